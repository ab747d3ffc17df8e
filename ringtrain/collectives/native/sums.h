// Arithmetic of sums, in rank order.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport.h"

namespace ringtrain {

int64_t size_of(Type type);

// Add `count` values of each source in order; multiply floating sums by `scale`. Half precision is summed in float32,
// and rounded once. `out` may be a source. Returns the sum of squares of the results.
double add_values(Type type, const std::vector<const std::byte*>& sources, int64_t count, double scale, std::byte* out);

}  // namespace ringtrain
