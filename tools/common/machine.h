/* Where and when figures were taken. */
#ifndef FDMA_TOOLS_COMMON_MACHINE_H
#define FDMA_TOOLS_COMMON_MACHINE_H

#include <stdint.h>
#include <stdio.h>

typedef struct machine_facts {
    char name[96];
    int32_t cores;
    int32_t device;    /* whose name and cores these are; 0: the CPU's */
    char compiler[64]; /* of the tool */
    char date[32];     /* UTC, ISO 8601 */
    char commit[80];   /* of the tree that the tool stands in; "" where it stands in none */
} machine_facts;

void find_machine(machine_facts *machine, int32_t device);

/*! print_machine() - one line for people. */
void print_machine(const machine_facts *machine, int threads);

/*! write_machine_json() - one line for programs: machine, cores, device, compiler, date, commit. */
void write_machine_json(FILE *stream, const machine_facts *machine);

#endif /* FDMA_TOOLS_COMMON_MACHINE_H */
