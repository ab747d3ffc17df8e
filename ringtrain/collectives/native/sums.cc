#include "sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Widest vectors of the processor, chosen at load time. (Sanitizers start later.)
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace ringtrain {
namespace {

constexpr int64_t kBlock = 1024;  // values; fits into the L1 cache
constexpr int kLanes = 16;        // independent sums of squares

// TensorFlow's pool threads flush subnormal numbers to zero, other threads do not. Every rank adds short sums itself,
// in any thread: for identical bits, disable flushing here.
class WithSubnormals {
 public:
  WithSubnormals() : mode_(get()) { set(mode_ & ~kFlushes); }
  ~WithSubnormals() { set(mode_); }

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlushes = 0x8040;  // inputs and results
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlushes = 1 << 24;
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kFlushes = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif
  const uint64_t mode_;
};

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float widen(Bfloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const uint32_t exponent = rest & (0x1fu << 23);
  if (exponent == 0x1fu << 23) return from_bits(sign | (rest + ((255u - 31u) << 23)));  // infinite or NaN
  if (exponent == 0) {                                                                  // subnormal
    const float small = from_bits(rest + (113u << 23)) - from_bits(113u << 23);
    return from_bits(sign | to_bits(small));
  }
  return from_bits(sign | (rest + ((127u - 15u) << 23)));
}

// Round to nearest, ties to even.
void narrow(float value, Bfloat16& out) {
  const uint32_t bits = to_bits(value);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void narrow(float value, Half& out) {
  const uint32_t bits = to_bits(value), size = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  uint32_t half;
  if (size > 0x7f800000) {
    half = 0x7e00;
  } else if (size >= 0x47800000) {  // 65536
    half = 0x7c00;
  } else if (size < 0x38800000) {  // 2^-14: adding 0.5 rounds, and leaves a subnormal's bits at the end
    half = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);
  } else {
    half = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

// Arithmetic of a type: accumulator, conversions.
template <typename T, typename Sum = T>
struct Plain {
  using Value = T;
  using Accumulator = Sum;
  static Sum widen(T value) { return static_cast<Sum>(value); }
  static T narrow(Sum sum) { return static_cast<T>(sum); }
};

template <typename T>
struct Narrow {
  using Value = T;
  using Accumulator = float;
  static float widen(T value) { return ringtrain::widen(value); }
  static T narrow(float sum) {
    T out;
    ringtrain::narrow(sum, out);
    return out;
  }
};

template <typename Rule, typename Square>
inline __attribute__((always_inline)) double squares_in(const typename Rule::Value* values, int64_t count) {
  Square lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Square value = static_cast<Square>(Rule::widen(values[i + lane]));
      lanes[lane] += value * value;
    }
  }
  double total = 0;
  for (; i < count; ++i) {
    const double value = static_cast<double>(Rule::widen(values[i]));
    total += value * value;
  }
  for (Square lane : lanes) total += static_cast<double>(lane);
  return total;
}

// One block at a time: float32 would lose digits in a longer sum. On overflow repeat in float64, so that only
// non-finite values give a non-finite result.
template <typename Rule>
inline __attribute__((always_inline)) double squares_of_block(const typename Rule::Value* values, int64_t count) {
  if constexpr (std::is_integral_v<typename Rule::Value>) return 0;  // unused for integers
  if constexpr (sizeof(typename Rule::Accumulator) == sizeof(float)) {
    const double squares = squares_in<Rule, float>(values, count);
    if (std::isfinite(squares)) return squares;
  }
  return squares_in<Rule, double>(values, count);
}

template <typename Rule>
inline __attribute__((always_inline)) double add_blocks(const std::byte* const* sources, int size, int64_t count,
                                                        double scale, std::byte* out) {
  using Value = typename Rule::Value;
  using Accumulator = typename Rule::Accumulator;
  double squares = 0;
  Accumulator sums[kBlock];
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = std::min(kBlock, count - start);
    const Value* first = reinterpret_cast<const Value*>(sources[0]) + start;
    for (int64_t i = 0; i < length; ++i) sums[i] = Rule::widen(first[i]);
    for (int rank = 1; rank < size; ++rank) {
      const Value* next = reinterpret_cast<const Value*>(sources[rank]) + start;
      for (int64_t i = 0; i < length; ++i) sums[i] += Rule::widen(next[i]);
    }
    Value* to = reinterpret_cast<Value*>(out) + start;
    if constexpr (!std::is_integral_v<Value>) {
      const Accumulator factor = static_cast<Accumulator>(scale);
      for (int64_t i = 0; i < length; ++i) sums[i] *= factor;  // exact for 1
    }
    for (int64_t i = 0; i < length; ++i) to[i] = Rule::narrow(sums[i]);
    squares += squares_of_block<Rule>(to, length);
  }
  return squares;
}

FOR_EACH_PROCESSOR double add(Type type, const std::byte* const* sources, int size, int64_t count, double scale,
                              std::byte* out) {
  switch (type) {
    case Type::kHalf:
      return add_blocks<Narrow<Half>>(sources, size, count, scale, out);
    case Type::kBfloat16:
      return add_blocks<Narrow<Bfloat16>>(sources, size, count, scale, out);
    case Type::kFloat:
      return add_blocks<Plain<float>>(sources, size, count, scale, out);
    case Type::kDouble:
      return add_blocks<Plain<double>>(sources, size, count, scale, out);
    case Type::kInt32:  // integers wrap, as in TensorFlow
      return add_blocks<Plain<int32_t, uint32_t>>(sources, size, count, scale, out);
    case Type::kInt64:
      return add_blocks<Plain<int64_t, uint64_t>>(sources, size, count, scale, out);
  }
  return 0;
}

}  // namespace

int64_t size_of(Type type) {
  switch (type) {
    case Type::kHalf:
    case Type::kBfloat16:
      return 2;
    case Type::kFloat:
    case Type::kInt32:
      return 4;
    default:
      return 8;
  }
}

double add_values(Type type, const std::vector<const std::byte*>& sources, int64_t count, double scale,
                  std::byte* out) {
  const WithSubnormals kept;
  return add(type, sources.data(), static_cast<int>(sources.size()), count, scale, out);
}

}  // namespace ringtrain
