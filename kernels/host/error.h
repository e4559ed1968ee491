// The text of the last error of the calling thread.
#pragma once

namespace mok {

// Keeps a message (printf format) for mok_last_error() and returns 1.
int fail(char const* format, ...);
char const* last_error();

}  // namespace mok
