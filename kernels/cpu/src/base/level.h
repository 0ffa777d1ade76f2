// What kernels must know about the processor beyond its instructions.
#pragma once

#include <cstdint>

namespace modulm {

// Whether the processor reads a stream of memory faster without prefetch instructions. Zen 4 does:
// its own prefetcher follows one stream across pages, and two instructions for each line delay it.
extern const bool streams_by_itself;

// The distance of prefetches in a stream: 0, which is the line that is read anyway, if they delay.
inline int64_t stream_distance(int64_t distance) { return streams_by_itself ? 0 : distance; }

}  // namespace modulm
