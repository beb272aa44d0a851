/* The `fdma` command: runs a subcommand, and checks that its output was written. */
#define _POSIX_C_SOURCE 200809L

#include "fdma.h"

#include "commands.h"
#include "common/nearest.h"
#include "common/options.h"
#include "common/text.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

const subcommand subcommands[] = {
    {"attend", attend_main, &attend_command,
     "run attention on the tensors of a file, over all keys and the best"},
    {"check", check_main, &check_command,
     "check every kernel of this machine against the reference"},
    {"bench", bench_main, &bench_command,
     "time each kernel, and compare it with what the machine can do"},
#ifdef FDMA_HAVE_CJSON
    {"generate", generate_main, &generate_command,
     "continue a prompt with a model of transformers, in constant memory"},
#endif
    {"info", info_main, &info_command,
     "print the kernels that would run, this machine, and all kernels"},
    {"man", man_main, &man_command, "print the manual page"},
    {"completion", completion_main, &completion_command,
     "print what completes command lines in bash, zsh or fish"},
    {0},
};

static void print_usage(FILE *stream) {
    fprintf(stream, "usage: fdma COMMAND [options]\n\n"
                    "Flash Dynamic Mask Attention: each query attends to its best keys only.\n\n");
    for (const subcommand *one = subcommands; one->name != NULL; one++)
        fprintf(stream, "  %-10s %s\n", one->name, one->about);
    fprintf(stream,
            "\n"
            "`fdma COMMAND --help` explains a command; `fdma --version` prints the version.\n"
            "Exit status: " EXIT_STATUS_TEXT);
}

static int run_command(int argc, char **argv) {
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_USAGE;
    }
    if (is_help(argv[1]) || strcmp(argv[1], "help") == 0) {
        print_usage(stdout);
        return EXIT_DONE;
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0) {
        printf("fdma %s\n", fdma_version());
        return EXIT_DONE;
    }
    nearest_name nearest = {.typed = argv[1]};
    for (const subcommand *one = subcommands; one->name != NULL; one++) {
        if (strcmp(one->name, argv[1]) == 0)
            return one->main(argc - 1, argv + 1);
        offer_name(&nearest, one->name, false);
    }
    print_unknown("fdma: no command", argv[1], nearest.name, "see fdma --help");
    return EXIT_USAGE;
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN); // a file size limit is then an error like a full disk
    const int code = run_command(argc, argv);
    if (fflush(stdout) != 0 || ferror(stdout) != 0) {
        print_error("fdma: standard output cannot be written: %s", strerror(errno));
        return code != EXIT_DONE ? code : EXIT_FAILED;
    }
    return code;
}
