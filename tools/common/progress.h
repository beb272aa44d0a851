/* One line on stderr about the current work, if stderr is a terminal; each line replaces the one
 * before. */
#pragma once

__attribute__((format(printf, 1, 2))) void show_progress(const char *format, ...);
void clear_progress(void);
