// One SIMD register of floats, and the three storage types read through it.
//
// GCC/Clang vector extensions carry the arithmetic on every machine; intrinsics appear only where the
// extensions have no word for the instruction (masked loads, widening, the transposing sum).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define KVPASS_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVPASS_AVX2 1
#endif

#define NOINLINE __attribute__((noinline))  // one copy of each inner loop, not one per caller: build time

namespace kvpass {

#if defined(KVPASS_AVX512)
constexpr int LANES = 16;
constexpr int QUERIES = 4;  // queries that share one pass over registers: 4 x 4 sums of 32 registers
#elif defined(KVPASS_AVX2)
constexpr int LANES = 8;
constexpr int QUERIES = 3;  // 3 x 4 sums of 16 registers
#else
constexpr int LANES = 4;
constexpr int QUERIES = 3;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t BitVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

template <class To, class From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline Vec all(float x) { return x - Vec{}; }  // x - 0 keeps the sign of -0
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

#if defined(KVPASS_AVX512)
inline float lane_max(Vec x) { return _mm512_reduce_max_ps(x); }
inline float lane_sum(Vec x) { return _mm512_reduce_add_ps(x); }
#else
template <class F>
inline float fold_lanes(Vec x, F f) {
  float t[LANES];
  store(t, x);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) t[i] = f(t[i], t[i + half]);
  return t[0];
}
inline float lane_max(Vec x) {
  return fold_lanes(x, [](float a, float b) { return a > b ? a : b; });
}
inline float lane_sum(Vec x) {
  return fold_lanes(x, [](float a, float b) { return a + b; });
}
#endif

// The four sums over lanes of a, b, c, d, written to out[0..3].
inline void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
#if defined(KVPASS_AVX512) || defined(KVPASS_AVX2)
#if defined(KVPASS_AVX512)
  auto fold = [](Vec x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); };
#else
  auto fold = [](Vec x) -> __m256 { return x; };
#endif
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
  out[0] = lane_sum(a), out[1] = lane_sum(b), out[2] = lane_sum(c), out[3] = lane_sum(d);
#endif
}

// exp(x) for x <= 0, relative error about 1e-7; exactly 0 below -87 and for -inf.
inline Vec exp_nonpositive(Vec x) {
  const float to_integer = 12582912.f;  // 1.5 * 2^23: adding it rounds to the nearest integer in the low bits
  Vec y = max(x, all(-87.f));
  Vec t = y * 1.44269504088896341f + to_integer;
  Vec n = t - to_integer;
  Vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.f);
  IntVec exponent = (IntVec)((bits_as<BitVec>(t) << 23) + 0x3f800000u);
  return x < -87.f ? Vec{} : p * bits_as<Vec>(exponent);
}

// tanh with an absolute error below 1e-7: a series near 0, where (1 - e) / (1 + e) cancels.
inline Vec tanh(Vec x) {
  Vec a = x < 0.f ? -x : x;
  Vec e = exp_nonpositive(-2.f * a);
  Vec s = a * a;
  Vec small = a * (1.f + s * (-0.333333333f + s * (0.133333333f - s * 0.0539682540f)));
  Vec y = a < 0.2f ? small : (1.f - e) / (1.f + e);
  return x < 0.f ? -y : y;
}

// ---- storage types: load a register, or its first n < LANES values without reading past them; round one
// ----

template <class X>
inline Vec load_through_buffer(const typename X::T* p, int64_t n) {
  typename X::T buffer[LANES] = {};
  std::memcpy(buffer, p, n * sizeof(typename X::T));
  return X::load(buffer);
}

struct F32 {
  using T = float;
  static Vec load(const T* p) { return kvpass::load(p); }
  static Vec load(const T* p, int64_t n) {
#if defined(KVPASS_AVX512)
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    return load_through_buffer<F32>(p, n);
#endif
  }
  static T put(float x) { return x; }
};

struct BF16 {
  using T = uint16_t;
  static Vec widen(HalfVec h) {
#if defined(KVPASS_AVX512)  // by name: GCC splits the vector conversion in two halves
    return bits_as<Vec>(bits_as<BitVec>(_mm512_cvtepu16_epi32(bits_as<__m256i>(h))) << 16);
#elif defined(KVPASS_AVX2)
    return bits_as<Vec>(bits_as<BitVec>(_mm256_cvtepu16_epi32(bits_as<__m128i>(h))) << 16);
#else
    return bits_as<Vec>(__builtin_convertvector(h, BitVec) << 16);
#endif
  }
  static Vec load(const T* p) {
    HalfVec h;
    std::memcpy(&h, p, sizeof h);
    return widen(h);
  }
  static Vec load(const T* p, int64_t n) {
#if defined(KVPASS_AVX512)
    return widen(bits_as<HalfVec>(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)));
#else
    return load_through_buffer<BF16>(p, n);
#endif
  }
  static T put(float x) {  // round to nearest even
    uint32_t u = bits_as<uint32_t>(x);
    if (x != x) return (T)((u >> 16) | 0x40);
    return (T)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};

struct F16 {
  using T = uint16_t;
  static Vec widen(HalfVec h) {
#if defined(KVPASS_AVX512)
    return _mm512_cvtph_ps(bits_as<__m256i>(h));
#elif defined(KVPASS_AVX2)
    return _mm256_cvtph_ps(bits_as<__m128i>(h));
#else
    BitVec u = __builtin_convertvector(h, BitVec), magnitude = (u & 0x7fffu) << 13;
    BitVec x =
        bits_as<BitVec>(bits_as<Vec>(magnitude) * 0x1p112f);  // rebias the exponent, subnormals included
    x = magnitude >= 0x7c00u << 13 ? x | 0x7f800000u : x;
    return bits_as<Vec>(x | (u & 0x8000u) << 16);
#endif
  }
  static Vec load(const T* p) {
    HalfVec h;
    std::memcpy(&h, p, sizeof h);
    return widen(h);
  }
  static Vec load(const T* p, int64_t n) {
#if defined(KVPASS_AVX512)
    return widen(bits_as<HalfVec>(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)));
#else
    return load_through_buffer<F16>(p, n);
#endif
  }
  static T put(float x) {  // round to nearest even
    uint32_t u = bits_as<uint32_t>(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (T)(sign | 0x7e00u);
    if (a >= 0x477ff000u) return (T)(sign | 0x7c00u);  // rounds to 2^16 or more
    if (a < 0x38800000u) return (T)(sign | (bits_as<uint32_t>(bits_as<float>(a) + 0.5f) - 0x3f000000u));
    return (T)(sign | ((a - 0x38000000u + 0xfffu + (a >> 13 & 1)) >> 13));
  }
};

// Calls f with the storage type of a code: 0 fp32, 1 bf16, 2 fp16.
template <class F>
inline void with_type(int64_t code, F f) {
  if (code == 0) return f(F32{});
  if (code == 1) return f(BF16{});
  f(F16{});
}

inline int64_t bytes_of(int64_t type) { return type == 0 ? 4 : 2; }

// Copies n values of a storage type to fp32, or back.
NOINLINE inline void widen(const char* from, int64_t type, float* to, int64_t n) {
  with_type(type, [&](auto t) {
    using X = decltype(t);
    const auto* x = (const typename X::T*)from;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, X::load(x + i));
    const Vec rest = i < n ? X::load(x + i, n - i) : Vec{};
    std::memcpy(to + i, &rest, (n - i) * 4);
  });
}
NOINLINE inline void narrow(const float* from, int64_t type, char* to, int64_t n) {
  with_type(type, [&](auto t) {
    using X = decltype(t);
    for (int64_t i = 0; i < n; i++) ((typename X::T*)to)[i] = X::put(from[i]);
  });
}

inline void prefetch(const void* p, int64_t bytes_ahead) {
  __builtin_prefetch(
      (const void*)((uintptr_t)p + (uintptr_t)bytes_ahead));  // may point past the end: never faults
}

// ---- dot products of R queries with n rows, the inner loop of both logits and linear layers ----

// out[r][j] = q[r] . row[j]. Queries are fp32, zero padded to whole registers; `out` has room for n rounded
// up to 4. The last group of four repeats its last row instead of taking a narrower path, so the bits of a
// sum never depend on where a row stands.
template <class X, int R>
NOINLINE void dots(const float* q, int64_t q_stride, const typename X::T* rows, int64_t row_stride, int64_t n,
                   int64_t dim, float* out, int64_t out_stride, int64_t bytes_ahead) {
  for (int64_t j = 0; j < n; j += 4) {
    const typename X::T* row[4];
    for (int u = 0; u < 4; u++) row[u] = rows + (j + u < n ? j + u : n - 1) * row_stride;
    Vec sum[R][4] = {};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
      for (int u = 0; u < 4; u++) {
        prefetch(row[u] + i, bytes_ahead);
        Vec x = X::load(row[u] + i);
        for (int r = 0; r < R; r++) sum[r][u] += x * load(q + r * q_stride + i);
      }
    }
    if (i < dim) {
      for (int u = 0; u < 4; u++) {
        Vec x = X::load(row[u] + i, dim - i);
        for (int r = 0; r < R; r++) sum[r][u] += x * load(q + r * q_stride + i);
      }
    }
    for (int r = 0; r < R; r++)
      store_sums(out + r * out_stride + j, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
}

// Calls f(R, first) with compile-time R <= QUERIES until `count` queries are covered, in blocks of even size.
template <class F>
inline void for_query_blocks(int64_t count, F f) {
  const int64_t blocks = (count + QUERIES - 1) / QUERIES;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t first = count * b / blocks, size = count * (b + 1) / blocks - first;
    if (size == 1) f(std::integral_constant<int, 1>{}, first);
    if (size == 2) f(std::integral_constant<int, 2>{}, first);
    if (size == 3) f(std::integral_constant<int, 3>{}, first);
    if (size == 4) f(std::integral_constant < int, QUERIES<4 ? 3 : 4>{}, first);
  }
}

// Memory that grows and is kept between calls; contents are never assumed.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  float* floats(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(64, round_up(count * 4, 64)));
      if (!data_) throw std::bad_alloc();
      capacity_ = count;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace kvpass
