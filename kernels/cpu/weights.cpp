// Passes over blocks of attention weights that torch spreads over many: softmax along entries, weighted squares, the
// best of a row. Parts are cut by size alone and joined in order, so results do not depend on the number of threads.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "vec.h"

namespace {

using kvpass::LANES, kvpass::IntVec, kvpass::Vec, kvpass::all, kvpass::load, kvpass::store;

constexpr int64_t PART = 1024;       // entries of a row that one thread takes at a time
constexpr float FAINT = 1e-18f;      // whose square is subnormal
constexpr float INF = std::numeric_limits<float>::infinity();

inline IntVec ints(const int32_t* p) {
  IntVec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline IntVec same(int32_t x) { return x - IntVec{}; }

// Logits in, 8-byte fields only. `columns` is a multiple of LANES.
struct Args {
  float* mass;                  // [rows, entries, columns] logits, becomes exponentials
  const int32_t *pos, *q_pos;   // [rows, entries] or null where every query sees all, [rows, columns]
  float *total, *log_z;         // [rows, columns]
  int64_t rows, entries, pos_stride, columns, threads;
};

template <bool causal>
inline Vec seen(const Args& a, const float* x, int64_t at, IntVec query) {
  const Vec logit = load(x);
  return causal ? (same(a.pos[at]) > query ? all(-INF) : logit) : logit;
}

template <bool causal>
void softmax(const Args& a) {
  const int64_t parts = (a.entries + PART - 1) / PART, W = a.columns;
  std::vector<float> peaks(a.rows * parts * W), sums(a.rows * parts * W), peak(a.rows * W);
  const auto walk = [&](int64_t job, auto&& visit) {
    const int64_t row = job / parts, begin = job % parts * PART, end = std::min(a.entries, begin + PART);
    for (int64_t w = 0; w < W; w += LANES) {
      const IntVec query = ints(a.q_pos + row * W + w);
      visit(row, w, query, begin, end);
    }
  };
#pragma omp parallel num_threads((int)a.threads) if (a.threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t job = 0; job < a.rows * parts; job++)
      walk(job, [&](int64_t row, int64_t w, IntVec query, int64_t begin, int64_t end) {
        Vec most = all(-INF);
        for (int64_t n = begin; n < end; n++)
          most = kvpass::max(most, seen<causal>(a, a.mass + (row * a.entries + n) * W + w, row * a.pos_stride + n, query));
        store(peaks.data() + job * W + w, most);
      });
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a.rows * W; i++) {
      const int64_t row = i / W, w = i % W;
      float most = -INF;
      for (int64_t part = 0; part < parts; part++) most = std::max(most, peaks[(row * parts + part) * W + w]);
      peak[i] = most == -INF || a.q_pos[i] < 0 ? INF : most;  // exp(x - inf) is 0
    }
#pragma omp for schedule(static)
    for (int64_t job = 0; job < a.rows * parts; job++)
      walk(job, [&](int64_t row, int64_t w, IntVec query, int64_t begin, int64_t end) {
        const Vec most = load(peak.data() + row * W + w);
        Vec sum{};
        for (int64_t n = begin; n < end; n++) {
          float* x = a.mass + (row * a.entries + n) * W + w;
          const Vec e = kvpass::exp_nonpositive(seen<causal>(a, x, row * a.pos_stride + n, query) - most);
          const Vec kept = e < FAINT ? Vec{} : e;
          sum += kept;
          store(x, kept);
        }
        store(sums.data() + job * W + w, sum);
      });
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a.rows * W; i++) {
      float sum = 0;
      for (int64_t part = 0; part < parts; part++) sum += sums[(i / W * parts + part) * W + i % W];
      const bool blind = peak[i] == INF;
      a.total[i] = blind ? 1 : sum;
      a.log_z[i] = blind ? INF : peak[i] + std::log(sum);
    }
  }
}

}  // namespace

// 0, or 1 when memory is exhausted.
extern "C" int kvpass_softmax(const Args* a) {
  try {
    a->pos ? softmax<true>(*a) : softmax<false>(*a);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// sum[row, entry] += sum over columns of mass^2 * scale[row, column].
extern "C" int kvpass_squares(const float* mass, const float* scale, float* sum, int64_t rows, int64_t entries,
                              int64_t columns, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < rows * entries; i++) {
    const float *x = mass + i * columns, *s = scale + i / entries * columns;
    Vec total{};
    for (int64_t w = 0; w < columns; w += LANES) total += load(x + w) * load(x + w) * load(s + w);
    sum[i] += kvpass::lane_sum(total);
  }
  return 0;
}

// The largest of every row of x [count, width] and the first place it stands at; `barred` [count / each, width] or
// null is added first.
extern "C" int kvpass_best(const float* x, const float* barred, int64_t count, int64_t each, int64_t width, float* most,
                           int64_t* place, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    const float *row = x + i * width, *bar = barred ? barred + i / each * width : nullptr;
    Vec best = all(-INF);
    IntVec at = same(0), here;
    for (int lane = 0; lane < LANES; lane++) here[lane] = lane;
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
      const Vec value = bar ? load(row + j) + load(bar + j) : load(row + j);
      const IntVec better = value > best;
      best = value > best ? value : best;
      at = better ? here : at;
      here += LANES;
    }
    float top = -INF;
    int64_t first = 0;
    for (int lane = 0; lane < LANES; lane++)
      if (best[lane] > top || (best[lane] == top && at[lane] < first)) top = best[lane], first = at[lane];
    for (; j < width; j++) {
      const float value = row[j] + (bar ? bar[j] : 0.f);
      if (value > top) top = value, first = j;
    }
    most[i] = top, place[i] = first;
  }
  return 0;
}
