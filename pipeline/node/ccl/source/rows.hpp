// Combine rows of elements into one: plain loops, compiled for any processor, for AVX2 and for AVX-512.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace manycpu::rows {
// Combines element by element, in the order of the rows; slowly if the result is one of the rows.
using Combine = void (*)(void* result, const void* const* rows, size_t count, size_t elements);

template <typename Stored>
struct Element {
  using Wide = Stored;
  static Wide widen(Stored value) { return value; }
  static Stored narrow(Wide value) { return value; }
};

// bfloat16: the upper half of a float.
struct Bfloat {
  uint16_t bits;
};

template <>
struct Element<Bfloat> {
  using Wide = float;
  static Wide widen(Bfloat value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }
  static Bfloat narrow(Wide value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest_even)};
  }
};

// float16: computed with integers, so that every compiler vectorises it for every processor.
struct Half {
  uint16_t bits;
};

template <>
struct Element<Half> {
  using Wide = float;
  static Wide widen(Half value) {
    const uint32_t magnitude = (value.bits & 0x7fffu) << 13, sign = (value.bits & 0x8000u) << 16;
    const uint32_t endless = magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0;  // infinity and NaN
    return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f) | endless | sign);
  }
  static Half narrow(Wide value) {
    const auto bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const uint32_t nearest_even = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding a half shifts the bits of a subnormal to the end, and rounds them.
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t endless = magnitude > 0x7f800000u ? 0x7e00 : 0x7c00;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : nearest_even;
    return {static_cast<uint16_t>((magnitude >= (143u << 23) ? endless : finite) | (bits >> 16 & 0x8000u))};
  }
};

// What is done with a result that is complete, of so many rows.
struct AsItIs {
  template <typename Wide>
  static Wide finish(Wide value, size_t) {
    return value;
  }
};

struct Sum : AsItIs {
  template <typename Wide>
  static Wide of(Wide a, Wide b) {
    if constexpr (std::is_integral_v<Wide>) {
      using Wrapping = std::make_unsigned_t<Wide>;
      return static_cast<Wide>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
    } else {
      return a + b;
    }
  }
};

struct Mean : Sum {
  template <typename Wide>
  static Wide finish(Wide value, size_t count) {
    return value / static_cast<Wide>(count);
  }
};

struct Least : AsItIs {
  template <typename Wide>
  static Wide of(Wide a, Wide b) {
    return b < a ? b : a;
  }
};

struct Greatest : AsItIs {
  template <typename Wide>
  static Wide of(Wide a, Wide b) {
    return a < b ? b : a;
  }
};

template <typename Stored, typename Operation>
[[gnu::always_inline]] inline void combine_two(Stored* result, const Stored* a, const Stored* b, size_t elements) {
  using Traits = Element<Stored>;
  for (size_t k = 0; k < elements; ++k) {
    result[k] = Traits::narrow(Operation::finish(Operation::of(Traits::widen(a[k]), Traits::widen(b[k])), 2));
  }
}

// A block stays in the innermost cache until all rows are added, so that narrow types are rounded only once.
template <typename Stored, typename Operation, typename Length>
[[gnu::always_inline]] inline void combine_block(
    Stored* result, const void* const* rows, size_t count, size_t start, Length length) {
  using Traits = Element<Stored>;
  typename Traits::Wide block[256];
  const auto* first = static_cast<const Stored*>(rows[0]) + start;
  for (size_t k = 0; k < length; ++k) block[k] = Traits::widen(first[k]);
  for (size_t row = 1; row < count; ++row) {
    const auto* next = static_cast<const Stored*>(rows[row]) + start;
    for (size_t k = 0; k < length; ++k) block[k] = Operation::of(block[k], Traits::widen(next[k]));
  }
  for (size_t k = 0; k < length; ++k) result[start + k] = Traits::narrow(Operation::finish(block[k], count));
}

template <typename Stored, typename Operation>
[[gnu::always_inline]] inline void combine(void* result, const void* const* rows, size_t count, size_t elements) {
  auto* to = static_cast<Stored*>(result);
  if (count == 2) {
    return combine_two<Stored, Operation>(
        to, static_cast<const Stored*>(rows[0]), static_cast<const Stored*>(rows[1]), elements);
  }
  constexpr std::integral_constant<size_t, 256> whole;
  size_t start = 0;
  for (; start + whole <= elements; start += whole) combine_block<Stored, Operation>(to, rows, count, start, whole);
  combine_block<Stored, Operation>(to, rows, count, start, elements - start);
}

template <typename Stored, typename Operation>
[[gnu::target("avx2")]] void combine_with_avx2(void* result, const void* const* rows, size_t count, size_t elements) {
  combine<Stored, Operation>(result, rows, count, elements);
}

template <typename Stored, typename Operation>
[[gnu::target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")]] void combine_with_avx512(
    void* result, const void* const* rows, size_t count, size_t elements) {
  combine<Stored, Operation>(result, rows, count, elements);
}

template <typename Stored, typename Operation>
void combine_anywhere(void* result, const void* const* rows, size_t count, size_t elements) {
  combine<Stored, Operation>(result, rows, count, elements);
}

template <typename Stored, typename Operation>
Combine best() {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return combine_with_avx512<Stored, Operation>;
  }
  return __builtin_cpu_supports("avx2") ? combine_with_avx2<Stored, Operation> : combine_anywhere<Stored, Operation>;
}
}  // namespace manycpu::rows
