// y = x W^T + bias for a few rows of x: the weight is read once, at the speed of memory.
//
// Threads take contiguous runs of weight rows and walk them four rows at a time against all rows of x.
#include <algorithm>
#include <new>

#include "vec.h"

namespace kvpass {

// 8-byte fields only, as packed by Python. Strides count elements.
struct LinearArgs {
  const char *x, *weight, *bias;  // bias may be null
  char* y;                        // [rows, out_features], contiguous
  int64_t rows, in_features, out_features, x_stride;
  int64_t y_type, weight_type, bias_type;  // codes of with_type; x has the type of y
  int64_t threads;
};

namespace {

constexpr int64_t BLOCK = 64;  // outputs finished together
constexpr int64_t BYTES_AHEAD = 8192;
constexpr int64_t PIECE_BYTES = 2 << 20;    // large weights are cut: a delayed thread holds up one piece
constexpr int64_t SERIAL_BYTES = 64 << 10;  // below this, waking threads costs more than it saves

// Outputs begin..end of every row; x is fp32 at a stride of whole registers, zero padded.
void outputs(const LinearArgs& a, const float* x, int64_t x_stride, int64_t begin, int64_t end) {
  float y[QUERIES * BLOCK], bias[BLOCK] = {};
  for (int64_t n = begin; n < end; n += BLOCK) {
    const int64_t count = std::min(BLOCK, end - n);
    if (a.bias) widen(a.bias + n * bytes_of(a.bias_type), a.bias_type, bias, count);
    for_query_blocks(a.rows, [&](auto R, int64_t first) {
      with_type(a.weight_type, [&](auto weight) {
        using W = decltype(weight);
        dots<W, R>(x + first * x_stride, x_stride, (const typename W::T*)a.weight + n * a.in_features,
                   a.in_features, count, a.in_features, y, BLOCK, BYTES_AHEAD);
      });
      for (int64_t m = 0; m < R; m++) {
        for (int64_t j = 0; j < count; j++) y[m * BLOCK + j] += bias[j];
        narrow(y + m * BLOCK, a.y_type, a.y + ((first + m) * a.out_features + n) * bytes_of(a.y_type), count);
      }
    });
  }
}

void linear(const LinearArgs& a, Scratch& scratch) {
  const int64_t stride = round_up(a.in_features, LANES);
  float* x = scratch.floats(a.rows * stride);
  for (int64_t m = 0; m < a.rows; m++) {
    widen(a.x + m * a.x_stride * bytes_of(a.y_type), a.y_type, x + m * stride, a.in_features);
    std::fill(x + m * stride + a.in_features, x + (m + 1) * stride, 0.f);
  }
  const int64_t bytes = a.out_features * a.in_features * bytes_of(a.weight_type);
  const int threads = bytes < SERIAL_BYTES ? 1 : (int)a.threads;
  const int64_t blocks = (a.out_features + BLOCK - 1) / BLOCK;
  const int64_t pieces = std::min(blocks, threads * std::max<int64_t>(1, bytes / (threads * PIECE_BYTES)));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t p = 0; p < pieces; p++)
    outputs(a, x, stride, blocks * p / pieces * BLOCK,
            std::min(a.out_features, blocks * (p + 1) / pieces * BLOCK));
}

}  // namespace
}  // namespace kvpass

// 0, or 1 when memory is exhausted.
extern "C" int kvpass_linear(const kvpass::LinearArgs* args) {
  static thread_local kvpass::Scratch scratch;
  try {
    kvpass::linear(*args, scratch);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
