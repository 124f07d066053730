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

constexpr int64_t MAX_LAYERS = 16;
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

// `count` layers of the same x in one parallel region: a small weight alone would cost more to share out than to read.
void linears(const LinearArgs* args, int64_t count, Scratch& scratch) {
  const LinearArgs& first = args[0];
  const int64_t stride = round_up(first.in_features, LANES);
  float* x = scratch.floats(first.rows * stride);
  for (int64_t m = 0; m < first.rows; m++) {
    widen(first.x + m * first.x_stride * bytes_of(first.y_type), first.y_type, x + m * stride, first.in_features);
    std::fill(x + m * stride + first.in_features, x + (m + 1) * stride, 0.f);
  }
  const auto bytes = [](const LinearArgs& a) { return a.out_features * a.in_features * bytes_of(a.weight_type); };
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += bytes(args[i]);
  const int threads = total < SERIAL_BYTES ? 1 : (int)first.threads;
  const int64_t goal = std::clamp<int64_t>(total / (threads * 2), SERIAL_BYTES, PIECE_BYTES);
  int64_t ends[MAX_LAYERS], blocks[MAX_LAYERS], pieces = 0;
  for (int64_t i = 0; i < count; i++) {
    blocks[i] = (args[i].out_features + BLOCK - 1) / BLOCK;
    pieces += std::clamp<int64_t>((bytes(args[i]) + goal - 1) / goal, 1, blocks[i]);
    ends[i] = pieces;
  }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t p = 0; p < pieces; p++) {
    int64_t i = 0;
    while (p >= ends[i]) i++;
    const int64_t start = i ? ends[i - 1] : 0, mine = ends[i] - start, k = p - start;
    outputs(args[i], x, stride, blocks[i] * k / mine * BLOCK,
            std::min(args[i].out_features, blocks[i] * (k + 1) / mine * BLOCK));
  }
}

}  // namespace
}  // namespace kvpass

// 0, or 1 when memory is exhausted. All layers have the x of the first; at most MAX_LAYERS of them.
extern "C" int kvpass_linears(const kvpass::LinearArgs* args, int64_t count) {
  static thread_local kvpass::Scratch scratch;
  try {
    kvpass::linears(args, count, scratch);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
