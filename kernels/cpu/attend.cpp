// Attention of a few new tokens over a ragged, voted store, the exact tail, and the new tokens themselves.
//
// The keys of one row (sequence, KV head) are a chain of segments: its store entries, the runs of tail slots
// that hold a visible token, the new tokens. The chain is cut into tiles of about `tile` keys; each tile
// yields a partial softmax for all queries of the row, so every key and value is read once whatever the group
// size; the partials are merged in the order of the chain. The cut depends on lengths alone, hence the result
// does not depend on the number of threads.
#include <omp.h>

#include <algorithm>
#include <limits>
#include <new>
#include <vector>

#include "vec.h"

namespace kvpass {

// The call, as packed by Python: 8-byte fields only. Strides count elements; last dimensions are contiguous.
struct AttendArgs {
  const char *q, *k_new, *v_new;
  const int32_t* q_pos;
  const char *store_k, *store_v;
  const float* log_votes;
  const int64_t* row_start;
  const int32_t* row_len;
  char *tail_k, *tail_v;
  const int32_t* tail_pos;
  const int64_t* tail_at;
  const float* sinks;  // may be null
  char* out;
  int64_t batch, heads, tokens, key_dim, kv_heads, value_dim, tail_slots;
  int64_t q_stride[4], k_new_stride[4], v_new_stride[4];  // sequence, head, token, 1
  int64_t tail_k_stride[4], tail_v_stride[4];
  int64_t q_pos_stride, tail_pos_stride, store_k_stride, store_v_stride;
  int64_t model_type, store_type, tail_type;  // codes of with_type
  int64_t window, chunk, writes, tile, threads;
  double scale, softcap;
};

namespace {

constexpr int64_t BLOCK = 64;              // keys whose logits are held at once
constexpr int64_t MAX_QUERIES = 128;       // (token, head) pairs served by one pass over the keys
constexpr int64_t MANY_PASSES = 8;         // from here the passes alone feed all threads: keys are not cut
constexpr int64_t BYTES_AHEAD = 4096;      // of prefetching: the hardware stops at pages
constexpr double SERIAL_BYTES = 64 << 10;  // below this, waking threads costs more than it saves
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Consecutive keys of one row.
struct Segment {
  const char *k, *v;
  int64_t k_stride, v_stride, type, count;
  const float* log_votes;  // null: one vote each
  const int32_t* pos;      // null: visible to every query of the pass
};

// Tail slots or new tokens in a row, each visible to some query of the pass.
struct Run {
  bool is_new;
  int64_t first, count;
};

// Tokens of one sequence that are served together; ranges index Plan::tokens and Plan::runs.
struct Pass {
  int64_t batch, first_token, tokens, first_run, runs, recent;  // recent: keys in the runs
};

// One (sequence, KV head): the keys of its passes, and the tail slots to write once all its tiles are done.
struct Row {
  int64_t batch, kv_head, first_group, groups, unfinished_tiles;
};

// The tiles of one row in one pass.
struct Group {
  int64_t row, pass, first_tile, tiles;
};

// Keys begin..end of a row's chain and where their partial softmax goes.
struct Tile {
  int64_t group, begin, end, partial;
};

struct Plan {
  std::vector<int64_t> tokens;  // which of the new tokens are not padding
  std::vector<Run> runs;
  std::vector<Pass> passes;
  std::vector<int64_t> first_pass;  // of each sequence, and the end
  std::vector<Row> rows;
  std::vector<Group> groups;
  std::vector<Tile> tiles;
  Scratch partials, working;
};

// Softmax over some keys for each query: max, sum of exp(logit - max), sum of exp(logit - max) * value.
struct Partial {
  float *max, *sum, *values;
  Partial(float* p, int64_t queries) : max(p), sum(p + queries), values(p + round_up(2 * queries, LANES)) {}
  static int64_t size(int64_t queries, int64_t stride) {
    return round_up(2 * queries, LANES) + queries * stride;
  }
};

bool visible(int64_t key, int64_t query, int64_t window, int64_t chunk) {
  return key >= 0 && key <= query && (window == 0 || key > query - window) &&
         (chunk == 0 || key >= query - query % chunk);
}

// values[r] += sum over keys of weight[r] * v: R queries by C registers of columns stay in registers.
template <class X, int R, int C, bool PART>
NOINLINE void add_columns(const float* weight, const typename X::T* v, int64_t v_stride, int64_t keys,
                          int64_t columns, float* values, int64_t stride) {
  Vec sum[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = load(values + r * stride + c * LANES);
  for (int64_t j = 0; j < keys; j++, v += v_stride) {
    for (int c = 0; c < C; c++) {
      prefetch(v + c * LANES, BYTES_AHEAD);
      Vec x = PART ? X::load(v, columns) : X::load(v + c * LANES);
      for (int r = 0; r < R; r++) sum[r][c] += weight[r * BLOCK + j] * x;
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(values + r * stride + c * LANES, sum[r][c]);
}

template <class X, int R>
void add_values(const float* weight, const typename X::T* v, int64_t v_stride, int64_t keys, int64_t dim,
                float* values, int64_t stride) {
  int64_t c = 0;
  for (; c + 4 * LANES <= dim; c += 4 * LANES)
    add_columns<X, R, 4, false>(weight, v + c, v_stride, keys, 0, values + c, stride);
  for (; c + LANES <= dim; c += LANES)
    add_columns<X, R, 1, false>(weight, v + c, v_stride, keys, 0, values + c, stride);
  if (c < dim) add_columns<X, R, 1, true>(weight, v + c, v_stride, keys, dim - c, values + c, stride);
}

struct Attend {
  const AttendArgs& a;
  Plan& plan;
  const int64_t share;                     // query heads per KV head
  const int64_t key_stride, value_stride;  // of the fp32 working copies: whole registers
  double bytes = 0;                        // of keys and values to be read
  int64_t partial_floats = 0;

  Attend(const AttendArgs& args, Plan& scratch)
      : a(args), plan(scratch), share(a.heads / a.kv_heads), key_stride(round_up(a.key_dim, LANES)),
        value_stride(round_up(a.value_dim, LANES)) {}

  void run() {
    for (int64_t b = 0; b < a.batch; b++) plan_passes(b);
    plan.first_pass.push_back(plan.passes.size());
    for (int64_t b = 0; b < a.batch; b++)
      for (int64_t h = 0; h < a.kv_heads; h++) plan_row(b, h);

    const int threads = bytes < SERIAL_BYTES ? 1 : (int)a.threads;
    const int64_t working = std::max(MAX_QUERIES, share) * (key_stride + BLOCK) + BLOCK;
    float* scratch = plan.working.floats(working * threads);
    float* partials = plan.partials.floats(partial_floats);
    for (const Row& row : plan.rows)
      if (row.unfinished_tiles == 0) append(row);  // nothing but padding
    const int64_t tiles = plan.tiles.size();
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int64_t t = 0; t < tiles; t++) {
      Row& row = plan.rows[plan.groups[plan.tiles[t].group].row];
      attend_tile(plan.tiles[t], row, scratch + working * omp_get_thread_num(), partials);
      // Whoever ends the last tile of a row finishes the row, so no thread waits for rows of others.
      if (__atomic_sub_fetch(&row.unfinished_tiles, 1, __ATOMIC_ACQ_REL) == 0) {
        for (int64_t g = 0; g < row.groups; g++) merge(plan.groups[row.first_group + g], row, partials);
        append(row);
      }
    }
  }

  // ---- plan ----

  void plan_passes(int64_t b) {
    const int32_t *q_pos = a.q_pos + b * a.q_pos_stride, *tail_pos = a.tail_pos + b * a.tail_pos_stride;
    const int64_t begin = plan.tokens.size();
    plan.first_pass.push_back(plan.passes.size());
    for (int64_t s = 0; s < a.tokens; s++) {
      if (q_pos[s] >= 0)
        plan.tokens.push_back(s);
      else
        clear_output(b, s);
    }
    const int64_t end = plan.tokens.size(), most = std::max<int64_t>(1, MAX_QUERIES / share);
    for (int64_t t = begin; t < end; t += most) {
      Pass pass = {b, t, std::min(most, end - t), (int64_t)plan.runs.size(), 0, 0};
      find_runs(pass, q_pos, tail_pos, a.tail_slots, false);
      find_runs(pass, q_pos, q_pos, a.tokens, true);
      pass.runs = plan.runs.size() - pass.first_run;
      plan.passes.push_back(pass);
    }
  }

  void find_runs(Pass& pass, const int32_t* q_pos, const int32_t* pos, int64_t count, bool is_new) {
    bool open = false;
    for (int64_t i = 0; i < count; i++) {
      bool seen = false;
      for (int64_t t = 0; t < pass.tokens && !seen && pos[i] >= 0; t++)
        seen = visible(pos[i], q_pos[plan.tokens[pass.first_token + t]], a.window, a.chunk);
      if (seen && !open) plan.runs.push_back({is_new, i, 0});
      if (seen) plan.runs.back().count++, pass.recent++;
      open = seen;
    }
  }

  void plan_row(int64_t b, int64_t h) {
    const int64_t entries = a.row_len[b * a.kv_heads + h], first = plan.first_pass[b];
    const int64_t passes = plan.first_pass[b + 1] - first;
    const bool whole = (int64_t)plan.passes.size() >= MANY_PASSES;
    Row row = {b, h, (int64_t)plan.groups.size(), passes, 0};
    for (int64_t p = first; p < first + passes; p++) {
      const Pass& pass = plan.passes[p];
      const int64_t queries = pass.tokens * share, keys = entries + pass.recent;
      const int64_t tiles = whole ? 1 : std::max<int64_t>(1, (keys + a.tile - 1) / a.tile);
      const int64_t group = plan.groups.size();
      plan.groups.push_back({(int64_t)plan.rows.size(), p, (int64_t)plan.tiles.size(), tiles});
      for (int64_t t = 0; t < tiles; t++) {
        plan.tiles.push_back({group, keys * t / tiles, keys * (t + 1) / tiles, partial_floats});
        partial_floats += Partial::size(queries, value_stride);
      }
      row.unfinished_tiles += tiles;
      bytes += (double)(entries * bytes_of(a.store_type) + pass.recent * bytes_of(a.tail_type)) *
               (a.key_dim + a.value_dim) * ((queries + QUERIES - 1) / QUERIES);
    }
    plan.rows.push_back(row);
  }

  // ---- one tile ----

  Segment store_segment(int64_t b, int64_t h) const {
    const int64_t start = a.row_start[b * a.kv_heads + h], size = bytes_of(a.store_type);
    return {a.store_k + start * a.store_k_stride * size,
            a.store_v + start * a.store_v_stride * size,
            a.store_k_stride,
            a.store_v_stride,
            a.store_type,
            a.row_len[b * a.kv_heads + h],
            a.log_votes + start,
            nullptr};
  }

  Segment recent_segment(const Run& run, int64_t b, int64_t h, bool one_token) const {
    const int64_t type = run.is_new ? a.model_type : a.tail_type, size = bytes_of(type);
    const int64_t* ks = run.is_new ? a.k_new_stride : a.tail_k_stride;
    const int64_t* vs = run.is_new ? a.v_new_stride : a.tail_v_stride;
    const char *k = run.is_new ? a.k_new : a.tail_k, *v = run.is_new ? a.v_new : a.tail_v;
    const int32_t* pos = run.is_new ? a.q_pos + b * a.q_pos_stride : a.tail_pos + b * a.tail_pos_stride;
    return {k + (b * ks[0] + h * ks[1] + run.first * ks[2]) * size,
            v + (b * vs[0] + h * vs[1] + run.first * vs[2]) * size,
            ks[2],
            vs[2],
            type,
            run.count,
            nullptr,
            one_token ? nullptr : pos + run.first};  // a run of a single query holds only keys it sees
  }

  void attend_tile(const Tile& tile, const Row& row, float* scratch, float* partials) const {
    const Pass& pass = plan.passes[plan.groups[tile.group].pass];
    const int64_t queries = pass.tokens * share;
    float *q = scratch, *logits = q + queries * key_stride, *bias = logits + queries * BLOCK;
    Partial out(partials + tile.partial, queries);
    std::fill_n(out.max, queries, NEVER);
    std::fill_n(out.sum, queries, 0.f);
    std::fill_n(out.values, queries * value_stride, 0.f);
    load_queries(pass, row.kv_head, q);

    int64_t at = 0;  // where the segment begins in the chain
    for (int64_t s = -1; s < pass.runs && at < tile.end; s++) {
      const Segment segment =
          s < 0 ? store_segment(pass.batch, row.kv_head)
                : recent_segment(plan.runs[pass.first_run + s], pass.batch, row.kv_head, pass.tokens == 1);
      const int64_t begin = std::max<int64_t>(0, tile.begin - at),
                    end = std::min(segment.count, tile.end - at);
      with_type(segment.type, [&](auto type) {
        for (int64_t j = begin; j < end; j += BLOCK)
          attend_block<decltype(type)>(pass, segment, j, std::min(BLOCK, end - j), q, logits, bias, out);
      });
      at += segment.count;
    }
  }

  void load_queries(const Pass& pass, int64_t kv_head, float* q) const {
    for (int64_t t = 0; t < pass.tokens; t++) {
      const int64_t token = plan.tokens[pass.first_token + t];
      for (int64_t g = 0; g < share; g++, q += key_stride) {
        const int64_t head = kv_head * share + g;
        const int64_t at = pass.batch * a.q_stride[0] + head * a.q_stride[1] + token * a.q_stride[2];
        widen(a.q + at * bytes_of(a.model_type), a.model_type, q, a.key_dim);
        std::fill(q + a.key_dim, q + key_stride, 0.f);
        for (int64_t i = 0; i < key_stride; i++) q[i] *= (float)a.scale;
      }
    }
  }

  // Folds `keys` <= BLOCK keys into the partial softmax: one rescale per block, not per key.
  template <class X>
  void attend_block(const Pass& pass, const Segment& segment, int64_t first, int64_t keys, const float* q,
                    float* logits, float* bias, Partial& out) const {
    const int64_t queries = pass.tokens * share;
    const auto* k = (const typename X::T*)segment.k + first * segment.k_stride;
    const auto* v = (const typename X::T*)segment.v + first * segment.v_stride;
    for_query_blocks(queries, [&](auto R, int64_t r) {
      dots<X, R>(q + r * key_stride, key_stride, k, segment.k_stride, keys, a.key_dim, logits + r * BLOCK,
                 BLOCK, BYTES_AHEAD);
    });
    std::fill_n(bias, BLOCK, NEVER);
    for (int64_t j = 0; j < keys; j++) bias[j] = segment.log_votes ? segment.log_votes[first + j] : 0;
    for (int64_t t = 0; t < pass.tokens; t++) {
      if (segment.pos) {
        const int64_t query = a.q_pos[pass.batch * a.q_pos_stride + plan.tokens[pass.first_token + t]];
        for (int64_t j = 0; j < keys; j++)
          bias[j] = visible(segment.pos[first + j], query, a.window, a.chunk) ? 0 : NEVER;
      }
      for (int64_t r = t * share; r < (t + 1) * share; r++)
        weigh(logits + r * BLOCK, bias, round_up(keys, LANES), out.max[r], out.sum[r],
              out.values + r * value_stride);
    }
    for_query_blocks(queries, [&](auto R, int64_t r) {
      add_values<X, R>(logits + r * BLOCK, v, segment.v_stride, keys, a.value_dim,
                       out.values + r * value_stride, value_stride);
    });
  }

  // Turns the logits of one query into weights exp(logit + bias - max); the running sums move to the new max.
  void weigh(float* logits, const float* bias, int64_t n, float& max, float& sum, float* values) const {
    const Vec never = all(NEVER);
    Vec top = never;
    for (int64_t j = 0; j < n; j += LANES) {
      Vec x = load(logits + j), b = load(bias + j);
      if (a.softcap > 0) x = (float)a.softcap * tanh(x * (float)(1 / a.softcap));
      x = b == never ? never : x + b;  // selects, so that what lies in a hidden slot cannot leak as NaN
      store(logits + j, x);
      top = kvpass::max(top, x);
    }
    const float highest = std::max(max, lane_max(top));
    if (highest > max) {
      const float shrink = std::exp(max - highest);
      sum *= shrink;
      for (int64_t c = 0; c < value_stride; c += LANES) store(values + c, load(values + c) * shrink);
      max = highest;
    }
    Vec total = {};
    for (int64_t j = 0; j < n; j += LANES) {
      Vec w = highest == NEVER ? Vec{} : exp_nonpositive(load(logits + j) - highest);
      store(logits + j, w);
      total += w;
    }
    sum += lane_sum(total);
  }

  // ---- after all tiles ----

  char* output(int64_t b, int64_t s, int64_t head) const {
    return a.out + ((b * a.tokens + s) * a.heads + head) * a.value_dim * bytes_of(a.model_type);
  }

  void clear_output(int64_t b, int64_t s) const {
    std::memset(output(b, s, 0), 0, a.heads * a.value_dim * bytes_of(a.model_type));
  }

  void merge(const Group& group, const Row& row, float* partials) const {
    const Pass& pass = plan.passes[group.pass];
    const int64_t queries = pass.tokens * share;
    const Tile* tiles = &plan.tiles[group.first_tile];
    for (int64_t r = 0; r < queries; r++) {
      const int64_t head = row.kv_head * share + r % share;
      float max = NEVER, sum = 0;
      for (int64_t t = 0; t < group.tiles; t++)
        max = std::max(max, Partial(partials + tiles[t].partial, queries).max[r]);
      const bool sees = max != NEVER;
      if (a.sinks) max = std::max(max, a.sinks[head]);
      float* total = Partial(partials + tiles[0].partial, queries).values + r * value_stride;
      for (int64_t t = 0; t < group.tiles && sees; t++) {
        Partial part(partials + tiles[t].partial, queries);
        const float weight = std::exp(part.max[r] - max);
        const float* values = part.values + r * value_stride;
        sum += weight * part.sum[r];
        for (int64_t c = 0; c < value_stride; c += LANES)
          store(total + c, t == 0 ? load(values + c) * weight : load(total + c) + load(values + c) * weight);
      }
      if (a.sinks && sees) sum += std::exp(a.sinks[head] - max);
      for (int64_t c = 0; c < value_stride; c += LANES)
        store(total + c, sees ? load(total + c) * (1 / sum) : Vec{});
      const int64_t token = plan.tokens[pass.first_token + r / share];
      narrow(total, a.model_type, output(pass.batch, token, head), a.value_dim);
    }
  }

  // Writes the last tail_slots of the new tokens of one row into their slots.
  void append(const Row& row) const {
    if (!a.writes) return;
    append(row, a.k_new, a.k_new_stride, a.tail_k, a.tail_k_stride, a.key_dim);
    append(row, a.v_new, a.v_new_stride, a.tail_v, a.tail_v_stride, a.value_dim);
  }

  void append(const Row& row, const char* from, const int64_t* from_stride, char* to,
              const int64_t* to_stride, int64_t dim) const {
    const int64_t b = row.batch, h = row.kv_head;
    float part[BLOCK];
    for (int64_t i = std::max<int64_t>(0, a.tokens - a.tail_slots); i < a.tokens && a.tail_slots > 0; i++) {
      const int64_t slot = (*a.tail_at + i) % a.tail_slots;
      const char* x =
          from + (b * from_stride[0] + h * from_stride[1] + i * from_stride[2]) * bytes_of(a.model_type);
      char* y = to + (b * to_stride[0] + h * to_stride[1] + slot * to_stride[2]) * bytes_of(a.tail_type);
      for (int64_t c = 0; c < dim; c += BLOCK) {
        widen(x + c * bytes_of(a.model_type), a.model_type, part, std::min(BLOCK, dim - c));
        narrow(part, a.tail_type, y + c * bytes_of(a.tail_type), std::min(BLOCK, dim - c));
      }
    }
  }
};

}  // namespace
}  // namespace kvpass

// 0, or 1 when memory is exhausted.
extern "C" int kvpass_attend(const kvpass::AttendArgs* args) {
  static thread_local kvpass::Plan plan;
  try {
    plan.tokens.clear(), plan.runs.clear(), plan.passes.clear(), plan.first_pass.clear();
    plan.rows.clear(), plan.groups.clear(), plan.tiles.clear();
    kvpass::Attend(*args, plan).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
