/* One line on stderr that says what is being done, if stderr is a terminal; each one replaces the
 * one before. */
#pragma once

__attribute__((format(printf, 1, 2))) void show_progress(const char *format, ...);
void clear_progress(void);
