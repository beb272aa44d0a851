/* `fdma info`: the kernels that would run, the machine, and all kernels. */
#include "fdma.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/json.h"
#include "common/options.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct info_options {
    bool json;
} info_options;

static const option option_table[] = {
    {"--json", NULL, "print one JSON object instead, for reports of faults", NULL,
     offsetof(info_options, json), OPTION_FLAG, false},
};

const command_line info_command = {
    .name = "fdma info",
    .about = "Prints which kernels would run forward and backward, this machine's features, and\n"
             "all kernels in the order in which they are tried.",
    .more = "Kernels that would run are those of causal calls with 8 heads of 128 channels and\n"
            "1024 keys; the list of all kernels marks them with the dtypes that they would run.\n",
    .option_count = sizeof option_table / sizeof option_table[0],
    .options = option_table,
};

static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16, FDMA_FLOAT64};

enum { dtype_count = sizeof dtypes / sizeof dtypes[0] };

/* The kernels that would run on a device; NULL if none takes the dtype. */
typedef struct device_choice {
    const char *forward[dtype_count], *decode[dtype_count], *backward[dtype_count];
} device_choice;

static const device_choice no_choice = {{NULL}, {NULL}, {NULL}};

static device_choice choose_kernels(int32_t device) {
    enum { LENGTH = 1024, HEADS = 8, HEAD_DIM = 128 };
    const fdma_tensor lse = fdma_tensor_3d(NULL, FDMA_FLOAT32, 1, HEADS, LENGTH);
    device_choice choice = no_choice;
    for (int d = 0; d < dtype_count; d++) {
        const fdma_tensor x = fdma_tensor_4d(NULL, dtypes[d], 1, LENGTH, HEADS, HEAD_DIM);
        const fdma_tensor query = fdma_tensor_4d(NULL, dtypes[d], 1, 1, HEADS, HEAD_DIM);
        const fdma_forward_args forward = {
            .size = sizeof forward,
            .q = x,
            .k = x,
            .v = x,
            .out = x,
            .causal = 1,
            .exec = {.device = device},
        };
        const fdma_backward_args backward = {
            .size = sizeof backward,
            .dout = x,
            .out = x,
            .lse = lse,
            .q = x,
            .k = x,
            .v = x,
            .dq = x,
            .dk = x,
            .dv = x,
            .causal = 1,
            .exec = {.device = device},
        };
        fdma_forward_args decode = forward;
        decode.q = decode.out = query;
        if (fdma_forward_kernel(&forward, &choice.forward[d]) != FDMA_OK)
            choice.forward[d] = NULL;
        if (fdma_forward_kernel(&decode, &choice.decode[d]) != FDMA_OK)
            choice.decode[d] = NULL;
        if (fdma_backward_kernel(&backward, &choice.backward[d]) != FDMA_OK)
            choice.backward[d] = NULL;
    }
    return choice;
}

static const char *name_or_none(const char *kernel) { return kernel != NULL ? kernel : "none"; }

static void print_choice(int32_t device, const device_choice *choice) {
    char where[32] = "cpu";
    if (device > 0)
        snprintf(where, sizeof where, "cuda %d", device);
    const int width = kernel_width();
    printf("\nruns on %-7s %-*s %-*s %s\n", where, width, "forward", width, "one query (decode)",
           "backward");
    for (int d = 0; d < dtype_count; d++)
        printf("  %-13s %-*s %-*s %s\n", dtype_name(dtypes[d]), width,
               name_or_none(choice->forward[d]), width, name_or_none(choice->decode[d]),
               name_or_none(choice->backward[d]));
}

static void print_cpu(void) {
    fdma_device_info cpu = {.size = sizeof cpu};
    if (fdma_describe_device(0, &cpu) != FDMA_OK) {
        printf("cpu        %s\n", fdma_last_error());
        return;
    }
    printf("cpu        %s, %d core%s\n", cpu.name, cpu.cores, cpu.cores == 1 ? "" : "s");
    printf("features   %s\n", cpu.features[0] != '\0' ? cpu.features : "none that kernels use");
}

/* The CUDA devices, with the numbers that --device takes, or why there are none. */
static void print_devices(void) {
    for (int32_t d = 1; d < fdma_device_count(); d++) {
        fdma_device_info device = {.size = sizeof device};
        if (fdma_describe_device(d, &device) == FDMA_OK)
            printf("cuda %-5d %s, %s, %d multiprocessors\n", d, device.name, device.features,
                   device.cores);
        else
            printf("cuda %-5d %s\n", d, fdma_last_error());
    }
    if (fdma_device_count() == 1)
        printf("cuda       none: %s\n", why_no_device());
}

static bool is_chosen(const char *chosen, const char *kernel) {
    return chosen != NULL && strcmp(chosen, kernel) == 0;
}

static void print_kernel(const fdma_kernel_info *kernel, const device_choice *choice) {
    printf("%-*s %-14s ", kernel_width(), kernel->name, kernel->operation);
    if (kernel->missing != NULL) {
        printf("no: lacks %s\n", kernel->missing);
        return;
    }
    const bool backward = strcmp(kernel->operation, "backward") == 0;
    const bool forward = strcmp(kernel->operation, "forward") == 0;
    printf("yes");
    for (int d = 0; d < dtype_count; d++)
        if ((backward && is_chosen(choice->backward[d], kernel->name)) ||
            (forward && (is_chosen(choice->forward[d], kernel->name) ||
                         is_chosen(choice->decode[d], kernel->name))))
            printf(" %s", dtype_name(dtypes[d]));
    printf("\n");
}

/* `choices` has one entry for the CPU and one for the first CUDA device. */
static void print_kernels(const device_choice choices[2]) {
    printf("\n%-*s %-14s %s\n", kernel_width(), "kernel", "operation",
           "available, and what runs on it");
    for (int32_t index = 0; index < fdma_kernel_count(); index++) {
        fdma_kernel_info kernel = {.size = sizeof kernel};
        if (fdma_describe_kernel(index, &kernel) == FDMA_OK)
            print_kernel(&kernel, &choices[runs_on(kernel.name, 0) ? 0 : 1]);
    }
}

#ifdef FDMA_HAVE_CJSON
static const bool has_files = true;
#else
static const bool has_files = false;
#endif

static void print_info(void) {
    device_choice choices[2] = {no_choice, no_choice};
    printf("fdma       %s\n", fdma_version());
    for (int32_t device = 0; device < fdma_device_count(); device++) {
        const device_choice choice = choose_kernels(device);
        if (device < 2)
            choices[device] = choice;
        print_choice(device, &choice);
    }
    printf("\n");
    print_cpu();
    print_devices();
    printf("files      %s\n",
           has_files ? "safetensors" : "none: fdma is built without cJSON (libcjson-dev)");
    print_kernels(choices);
}

static void json_choice(const char *name, const char *const kernels[dtype_count]) {
    printf(", \"%s\": {", name);
    for (int d = 0; d < dtype_count; d++) {
        printf("%s\"%s\": ", d > 0 ? ", " : "", dtype_name(dtypes[d]));
        json_string(stdout, kernels[d]);
    }
    printf("}");
}

static void json_devices(void) {
    printf(", \"devices\": [");
    for (int32_t d = 0; d < fdma_device_count(); d++) {
        fdma_device_info device = {.size = sizeof device};
        const bool known = fdma_describe_device(d, &device) == FDMA_OK;
        const device_choice choice = choose_kernels(d);
        printf("%s{\"name\": ", d > 0 ? ", " : "");
        json_string(stdout, known ? device.name : NULL);
        printf(", \"cores\": %d, \"features\": ", device.cores);
        json_string(stdout, known ? device.features : NULL);
        json_choice("forward", choice.forward);
        json_choice("decode", choice.decode);
        json_choice("backward", choice.backward);
        printf("}");
    }
    printf("]");
}

static void json_kernels(void) {
    const char *between = "";
    printf(", \"kernels\": [");
    for (int32_t index = 0; index < fdma_kernel_count(); index++) {
        fdma_kernel_info kernel = {.size = sizeof kernel};
        if (fdma_describe_kernel(index, &kernel) != FDMA_OK)
            continue;
        printf("%s{\"name\": \"%s\", \"operation\": \"%s\", \"missing\": ", between, kernel.name,
               kernel.operation);
        json_string(stdout, kernel.missing);
        printf("}");
        between = ", ";
    }
    printf("]");
}

static void print_json(void) {
    printf("{\"fdma\": \"%s\"", fdma_version());
    json_devices();
    printf(", \"cuda\": ");
    json_string(stdout, fdma_device_count() == 1 ? why_no_device() : NULL);
    printf(", \"files\": ");
    json_bool(stdout, has_files);
    json_kernels();
    printf("}\n");
}

int info_main(int argc, char **argv) {
    info_options options = {0};
    const int read = read_options(&info_command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    if (options.json)
        print_json();
    else
        print_info();
    return EXIT_DONE;
}
