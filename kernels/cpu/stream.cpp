// Reads memory and does next to nothing with it: the bandwidth that the kernels are measured against.
#include "vec.h"

extern "C" float kvpass_stream(const float* data, int64_t count, int64_t threads) {
  using namespace kvpass;
  constexpr int64_t CHUNK = 4096;  // floats
  float total = 0;
#pragma omp parallel for num_threads((int)threads) schedule(static) reduction(+ : total)
  for (int64_t c = 0; c < count / CHUNK; c++) {
    const float* p = data + c * CHUNK;
    Vec sum[4] = {};
    for (int64_t i = 0; i < CHUNK; i += 4 * LANES) {
      for (int u = 0; u < 4; u++) {
        prefetch(p + i + u * LANES, 4096);
        sum[u] += load(p + i + u * LANES);
      }
    }
    total += lane_sum(sum[0] + sum[1] + sum[2] + sum[3]);
  }
  return total;
}
