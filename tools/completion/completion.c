/* `fdma completion`: what a shell completes command lines with, from the tables of options. */
#include "commands.h"
#include "common/options.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct completion_options {
    const char *shell;
} completion_options;

static const char *const shells[] = {"bash", "zsh", "fish", NULL};

const command_line completion_command = {
    .name = "fdma completion",
    .about = "Prints what completes command lines of fdma in SHELL: bash, zsh or fish.",
    .more = "bash    eval \"$(fdma completion bash)\" in ~/.bashrc\n"
            "zsh     fdma completion zsh >FOLDER/_fdma, with a FOLDER of $fpath\n"
            "fish    fdma completion fish >~/.config/fish/completions/fdma.fish\n",
    .operand = "SHELL",
    .operand_offset = offsetof(completion_options, shell),
    .operand_required = true,
    .operand_choices = shells,
};

/* True for a value or an operand that is a path: it is called FILE or DIR. */
static bool is_path(const char *value) {
    return value != NULL &&
           (strncmp(value, "FILE", strlen("FILE")) == 0 || strcmp(value, "DIR") == 0);
}

static void print_words(const char *const *words) {
    for (int w = 0; words != NULL && words[w] != NULL; w++)
        printf("%s%s", w > 0 ? " " : "", words[w]);
}

/* The first line of a text, inside single quotes; `special` are characters that get a backslash. */
static void print_quoted(const char *text, const char *special) {
    for (; *text != '\0' && *text != '\n'; text++) {
        if (*text == '\'')
            printf("'\\'");
        else if (strchr(special, *text) != NULL)
            putchar('\\');
        putchar(*text);
    }
}

static void print_bash_command(const subcommand *one) {
    const command_line *line = one->line;
    for (int o = 0; o < line->option_count; o++) {
        const option *known = &line->options[o];
        if (known->kind == OPTION_FLAG)
            continue;
        printf("    '%s %s') words='", one->name, known->name);
        print_words(known->choices);
        printf("' paths=%s ;;\n", is_path(known->value) ? "yes" : "");
    }
    printf("    '%s '*) words='", one->name);
    for (int o = 0; o < line->option_count; o++)
        printf("%s ", line->options[o].name);
    printf("--help ");
    print_words(line->operand_choices);
    printf("' paths=%s ;;\n", is_path(line->operand) ? "yes" : "");
}

/* bash splits "--scope=global" into three words. */
static void print_bash(void) {
    printf("_fdma() {\n"
           "    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}\n"
           "    local words='' paths=''\n"
           "    [ \"$before\" != = ] || before=${COMP_WORDS[COMP_CWORD - 2]}\n"
           "    [ \"$current\" != = ] || current=\n"
           "    [ \"$COMP_CWORD\" != 1 ] || before=\n"
           "    case \"${COMP_WORDS[1]} $before\" in\n");
    for (const subcommand *one = subcommands; one->name != NULL; one++)
        print_bash_command(one);
    printf("    esac\n"
           "    if [ \"$COMP_CWORD\" = 1 ]; then\n"
           "        paths='' words='");
    for (const subcommand *one = subcommands; one->name != NULL; one++)
        printf("%s ", one->name);
    printf("--help --version'\n"
           "    fi\n"
           "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n"
           "    if [ -n \"$paths\" ] && [ \"${current#-}\" = \"$current\" ]; then\n"
           "        compopt -o filenames 2>/dev/null\n"
           "        mapfile -t -O \"${#COMPREPLY[@]}\" COMPREPLY < <(compgen -f -- \"$current\")\n"
           "    fi\n"
           "}\n"
           "complete -F _fdma fdma\n");
}

static void print_zsh_value(const char *value, const char *const *words) {
    printf(":%s:", value);
    if (words != NULL) {
        printf("(");
        print_words(words);
        printf(")");
    } else if (is_path(value)) {
        printf("_files");
    }
}

static void print_zsh_command(const subcommand *one) {
    const command_line *line = one->line;
    printf("    %s)\n        _arguments '--help[print the help]'", one->name);
    for (int o = 0; o < line->option_count; o++) {
        const option *known = &line->options[o];
        printf(" \\\n            '%s%s[", known->name, known->kind == OPTION_FLAG ? "" : "=");
        print_quoted(known->help, "[]\\:");
        printf("]");
        if (known->kind != OPTION_FLAG)
            print_zsh_value(known->value, known->choices);
        printf("'");
    }
    if (line->operand != NULL) {
        printf(" \\\n            '1");
        print_zsh_value(line->operand, line->operand_choices);
        printf("'");
    }
    printf("\n        ;;\n");
}

static void print_zsh(void) {
    printf("#compdef fdma\n"
           "_fdma() {\n"
           "    if ((CURRENT == 2)); then\n"
           "        local -a names=(");
    for (const subcommand *one = subcommands; one->name != NULL; one++) {
        printf("\n            '%s:", one->name);
        print_quoted(one->about, ":\\");
        printf("'");
    }
    printf(")\n"
           "        _describe command names\n"
           "        return\n"
           "    fi\n"
           "    shift words\n"
           "    ((CURRENT--))\n"
           "    case $words[1] in\n");
    for (const subcommand *one = subcommands; one->name != NULL; one++)
        print_zsh_command(one);
    printf("    esac\n"
           "}\n"
           "if [ \"$funcstack[1]\" = _fdma ]; then _fdma \"$@\"; else compdef _fdma fdma; fi\n");
}

static void print_fish_rule(const char *command) {
    printf("complete -c fdma -n '__fish_seen_subcommand_from %s'", command);
}

static void print_fish_command(const subcommand *one) {
    const command_line *line = one->line;
    printf("complete -c fdma -n __fish_use_subcommand -a %s -d '", one->name);
    print_quoted(one->about, "\\");
    printf("'\n");
    for (int o = 0; o < line->option_count; o++) {
        const option *known = &line->options[o];
        print_fish_rule(one->name);
        printf(" -l %s", known->name + strlen("--"));
        if (known->kind != OPTION_FLAG)
            printf(is_path(known->value) ? " -r -F" : " -x");
        if (known->choices != NULL) {
            printf(" -a '");
            print_words(known->choices);
            printf("'");
        }
        printf(" -d '");
        print_quoted(known->help, "\\");
        printf("'\n");
    }
    if (is_path(line->operand)) {
        print_fish_rule(one->name);
        printf(" -F\n");
    } else if (line->operand_choices != NULL) {
        print_fish_rule(one->name);
        printf(" -a '");
        print_words(line->operand_choices);
        printf("'\n");
    }
}

static void print_fish(void) {
    printf("complete -c fdma -f\n"
           "complete -c fdma -l help -d 'print the help'\n"
           "complete -c fdma -n __fish_use_subcommand -l version -d 'print the version'\n");
    for (const subcommand *one = subcommands; one->name != NULL; one++)
        print_fish_command(one);
}

int completion_main(int argc, char **argv) {
    completion_options options = {0};
    const int read = read_options(&completion_command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    static void (*const prints[])(void) = {print_bash, print_zsh, print_fish};
    for (int s = 0; shells[s] != NULL; s++)
        if (strcmp(shells[s], options.shell) == 0)
            prints[s]();
    return EXIT_DONE;
}
