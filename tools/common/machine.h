/* The machine, compiler and commit that figures belong to. */
#pragma once

#include <stdint.h>
#include <stdio.h>

typedef struct machine_info {
    char name[96];
    int32_t cores;
    int32_t device;    /* the device that name and cores describe; 0: the CPU */
    char compiler[64]; /* compiler of the tool */
    char date[32];     /* UTC, ISO 8601 */
    char commit[80];   /* commit of the working tree that contains the tool; "" if there is none */
} machine_info;

void find_machine(machine_info *machine, int32_t device);

/*! print_machine() - one line of text. */
void print_machine(const machine_info *machine, int threads);

/*! write_machine_json() - one line of JSON: machine, cores, device, compiler, date, commit. */
void write_machine_json(FILE *stream, const machine_info *machine);

/*! count_threads() - of this process, or 0 where the system does not say. */
int64_t count_threads(void);
