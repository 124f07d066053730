// What prototypes of intervals cost the queries that judge them, see kernels/prototype.py: all cuts of an interval
// from one walk over its entries forwards (their left parts) and one backwards (their right parts).
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "vec.h"

namespace {

using kvpass::LANES, kvpass::Vec, kvpass::all, kvpass::lane_sum, kvpass::load;

constexpr double MASS = 0.25, OUTPUT = 0.75, BASE = 0.1;
constexpr float TINY = 1e-12f, TOP = 60.f;

// 8-byte fields only, as packed by Python. A layer has R rows of N entries and P probes a row.
struct Args {
  const float *k, *size, *v, *votes, *relevance;  // [R, N, D], [R, N], [R, N, Dv], [R, N], [R, N]
  const float *probes, *peak, *mass, *total;      // [R, P, D], [R, P], [R, N, P], [R, P]
  const int64_t *pos, *seen;                      // [R, N], [R, P]
  const int64_t *first, *second;                  // [pairs] channels that turn together
  const float *cos, *sin;                         // [positions, pairs]
  const int64_t *row, *start, *stop;              // [n] intervals
  const int64_t* ends;                            // [n, K] left parts start .. end, any order
  const int64_t* begins;                          // [n, K] right parts begin .. stop
  double* cost;                                   // [n, 2 K]
  int64_t entries, dim, value_dim, probe_count, pairs, count, cuts, coherent, threads;
};

struct Sums {
  std::vector<float> k, v, rv, mass, output, key, value;
  double size, votes, pos, relevance;
  int64_t n;
  explicit Sums(const Args& a)
      : k(a.dim), v(a.value_dim), rv(a.value_dim), mass(a.probe_count), output(a.probe_count * a.value_dim),
        key(a.dim), value(a.value_dim) {}
  void clear() {
    for (auto* x : {&k, &v, &rv, &mass, &output}) std::fill(x->begin(), x->end(), 0.f);
    size = votes = pos = relevance = 0;
    n = 0;
  }
};

// Adds entries begin .. end of a row.
void add(const Args& a, int64_t row, int64_t begin, int64_t end, Sums& s) {
  const int64_t D = a.dim, V = a.value_dim, P = a.probe_count;
  for (int64_t t = begin; t < end; t++) {
    const int64_t at = row * a.entries + t;
    const float* k = a.k + at * D;
    const float* v = a.v + at * V;
    const float r = a.relevance[at];
    for (int64_t j = 0; j < D; j++) s.k[j] += k[j];
    for (int64_t j = 0; j < V; j++) s.v[j] += v[j], s.rv[j] += r * v[j];
    for (int64_t p = 0; p < P; p++) s.mass[p] += a.mass[at * P + p];
    s.size += a.size[at], s.votes += a.votes[at], s.pos += a.pos[at], s.relevance += r;
  }
  s.n += end - begin;
  // A block of values stays in registers while the members go by.
  for (int64_t p = 0; p < P; p += 4) {
    const int64_t many = std::min<int64_t>(4, P - p);
    for (int64_t j = 0; j < V; j += 2 * LANES) {
      if (many == 4 && j + 2 * LANES <= V) {
        Vec m[4][2];
        for (int i = 0; i < 4; i++)
          for (int h = 0; h < 2; h++) m[i][h] = load(s.output.data() + (p + i) * V + j + h * LANES);
        for (int64_t t = begin; t < end; t++) {
          const float *v = a.v + (row * a.entries + t) * V + j, *e = a.mass + (row * a.entries + t) * P + p;
          const Vec v0 = load(v), v1 = load(v + LANES);
          for (int i = 0; i < 4; i++) m[i][0] += all(e[i]) * v0, m[i][1] += all(e[i]) * v1;
        }
        for (int i = 0; i < 4; i++)
          for (int h = 0; h < 2; h++) kvpass::store(s.output.data() + (p + i) * V + j + h * LANES, m[i][h]);
        continue;
      }
      for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < many; i++)
          for (int64_t c = j; c < std::min(V, j + 2 * LANES); c++)
            s.output[(p + i) * V + c] += a.mass[(row * a.entries + t) * P + p + i] * a.v[(row * a.entries + t) * V + c];
    }
  }
}

float dot(const float* x, const float* y, int64_t n) {
  Vec sum{};
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) sum += load(x + j) * load(y + j);
  float rest = 0;
  for (; j < n; j++) rest += x[j] * y[j];
  return lane_sum(sum) + rest;
}

// |x - scale * y|^2 and |x|^2.
void apart(const float* x, const float* y, float scale, int64_t n, float& off, float& norm) {
  Vec far{}, own{};
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) {
    const Vec a = load(x + j), d = a - all(scale) * load(y + j);
    far += d * d, own += a * a;
  }
  off = lane_sum(far), norm = lane_sum(own);
  for (; j < n; j++) {
    const float d = x[j] - scale * y[j];
    off += d * d, norm += x[j] * x[j];
  }
}

double judged(const Args& a, int64_t row, int64_t stop, Sums& s) {
  if (s.n < 2) return 0;
  const int64_t D = a.dim, V = a.value_dim, P = a.probe_count;
  double length = 0;
  for (int64_t j = 0; j < D; j++) s.key[j] = s.k[j] / s.n, length += (double)s.key[j] * s.key[j];
  float vote = std::log(s.votes);
  if (a.coherent) {
    const double coherence = std::sqrt(length) / (s.size / s.n + 1e-6);
    vote = std::min<float>(vote, std::max<float>(0, vote + 2 * std::log(coherence)));
  }
  const int64_t at = (int64_t)std::nearbyint(s.pos / s.n);
  for (int64_t i = 0; i < a.pairs; i++) {
    const float c = a.cos[at * a.pairs + i], n = a.sin[at * a.pairs + i];
    const float x = s.key[a.first[i]], y = s.key[a.second[i]];
    s.key[a.first[i]] = x * c - y * n;
    s.key[a.second[i]] = x * n + y * c;
  }
  const float even = BASE * s.relevance / s.n + 1e-30, whole = s.relevance + even * s.n;
  for (int64_t j = 0; j < V; j++) s.value[j] = (s.rv[j] + even * s.v[j]) / whole;
  double sum = 0;
  int64_t counted = 0;
  for (int64_t p = 0; p < P; p++) {
    if (a.seen[row * P + p] < stop) continue;
    counted++;
    const float* q = a.probes + (row * P + p) * D;
    const float* m = s.output.data() + p * V;
    const float own = std::exp(std::min(TOP, dot(q, s.key.data(), D) + vote - a.peak[row * P + p]));
    float off, norm;
    apart(m, s.value.data(), own, V, off, norm);
    const float z = s.mass[p], d = z - own;
    sum += z / a.total[row * P + p] * (MASS * d * d / (z * z + TINY) + OUTPUT * off / (norm + TINY));
  }
  return counted ? sum / counted : 0;
}

void interval(const Args& a, int64_t i, Sums& s, std::vector<int64_t>& order) {
  const int64_t row = a.row[i], K = a.cuts;
  const auto clip = [&](int64_t t) { return std::clamp(t, a.start[i], a.stop[i]); };
  for (int64_t right = 0; right < 2; right++) {
    const int64_t* cut = (right ? a.begins : a.ends) + i * K;
    for (int64_t c = 0; c < K; c++) order[c] = c;
    std::sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return right ? cut[x] > cut[y] : cut[x] < cut[y]; });
    s.clear();
    int64_t done = right ? a.stop[i] : a.start[i], last = -1;
    double cost = 0;
    for (const int64_t c : order) {
      const int64_t t = clip(cut[c]);
      if (t != last) {
        if (right) add(a, row, t, done, s);
        else add(a, row, done, t, s);
        done = last = t;
        cost = judged(a, row, right ? a.stop[i] : t, s);
      }
      a.cost[i * 2 * K + right * K + c] = cost;
    }
  }
}

}  // namespace

// 0, or 1 when memory is exhausted.
extern "C" int kvpass_split_costs(const Args* args) {
  const Args& a = *args;
  try {
    std::vector<Sums> sums(std::max<int64_t>(1, a.threads), Sums(a));
    std::vector<std::vector<int64_t>> orders(sums.size(), std::vector<int64_t>(a.cuts));
#pragma omp parallel for num_threads((int)a.threads) if (a.threads > 1 && a.count > 16) schedule(dynamic, 8)
    for (int64_t i = 0; i < a.count; i++) interval(a, i, sums[omp_get_thread_num()], orders[omp_get_thread_num()]);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
