// A browser starts no worker from a file on disk. There the worker of the search is a frame instead,
// in which its script runs as in any page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>
        const owner = parent;
        let answer;
        window.setAnswer = (given) => (answer = given);
        window.postMessage = (data) => answer(data);
        window.importScripts = () => {};
      </script><script src="${new URL(url, location.href)}"></script>`;
      this.ready = new Promise((resolve) => (this.frame.onload = resolve));
      this.ready.then(() => this.frame.contentWindow.setAnswer((data) => this.receive(data)));
      document.body.append(this.frame);
    }
    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      const frame = this.frame.contentWindow;
      this.ready.then(() => frame.dispatchEvent(new frame.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
