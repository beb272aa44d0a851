/* One line on stderr that says what is being done, if stderr is a terminal; each one replaces the
 * one before. */
#ifndef FDMA_TOOLS_COMMON_PROGRESS_H
#define FDMA_TOOLS_COMMON_PROGRESS_H

__attribute__((format(printf, 1, 2))) void show_progress(const char *format, ...);
void clear_progress(void);

#endif /* FDMA_TOOLS_COMMON_PROGRESS_H */
