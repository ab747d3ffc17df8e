// The arithmetic of sums: values of one type added in the order of the ranks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport.h"

namespace ringtrain {

int64_t size_of(Type type);

// Add `count` values of each source, in their order, and multiply the sums, but those of whole numbers, by `scale`;
// half precision in float32, rounded once. `out` may be one of the sources. Returns the sum of squares of what it
// writes.
double add_values(Type type, const std::vector<const std::byte*>& sources, int64_t count, double scale, std::byte* out);

}  // namespace ringtrain
