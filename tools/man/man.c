/* `fdma man`: the manual page, from the tables of options, in the macros of man(7). */
#include "fdma.h"

#include "commands.h"
#include "common/options.h"

#include <stddef.h>
#include <stdio.h>

const command_line man_command = {
    .name = "fdma man",
    .about = "Prints the manual page, for man(1): fdma man | man -l -",
};

/* Prints text so that roff finds no request in it; a '\n' stays, or becomes a space. */
static void print_roff(const char *text, bool keeps_lines) {
    bool begins_line = true;
    for (; *text != '\0'; text++) {
        if (begins_line && (*text == '.' || *text == '\''))
            printf("\\&");
        begins_line = *text == '\n' && keeps_lines;
        if (*text == '\\')
            printf("\\e");
        else
            putchar(*text == '\n' && !keeps_lines ? ' ' : *text);
    }
}

static void print_paragraph(const char *text) {
    print_roff(text, false);
    putchar('\n');
}

static void print_command(const subcommand *one) {
    const command_line *line = one->line;
    printf(".SS fdma %s\n.B ", one->name);
    print_synopsis(line);
    printf("\n.PP\n");
    print_paragraph(line->about);
    for (int o = 0; o < line->option_count; o++) {
        const option *known = &line->options[o];
        printf(".TP\n.B ");
        print_roff(known->name, false);
        if (known->value != NULL)
            printf(" \\fI%s\\fR", known->value);
        putchar('\n');
        print_paragraph(known->help);
    }
    if (line->more != NULL) { // it has columns, whose lines are not to be filled
        printf(".PP\n.nf\n");
        print_roff(line->more, true);
        printf(".fi\n");
    }
}

int man_main(int argc, char **argv) {
    const int read = read_options(&man_command, argc, argv, NULL);
    if (read != OPTIONS_READ)
        return read;
    printf(".tr -\\-\n" // options are to be copied, with their hyphens
           ".TH FDMA 1 \"\" \"fdma %s\" \"User Commands\"\n"
           ".SH NAME\nfdma \\- attention of each query over its best keys\n"
           ".SH SYNOPSIS\n.B fdma\n.I COMMAND\n[options]\n.br\n"
           ".B fdma\n.I COMMAND\n.B --help\n.br\n.B fdma --version\n"
           ".SH DESCRIPTION\n"
           "Flash Dynamic Mask Attention: each query attends to its best keys only.\n"
           "An option and its value are two arguments, or one with an equals sign between them.\n"
           ".SH COMMANDS\n",
           fdma_version());
    for (const subcommand *one = subcommands; one->name != NULL; one++)
        print_command(one);
    printf(".SH EXIT STATUS\n");
    print_paragraph(EXIT_STATUS_TEXT);
    return EXIT_DONE;
}
