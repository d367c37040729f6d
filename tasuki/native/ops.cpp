// The operators that Python calls: checks of what they are given, and the sharing out of work.
//
// Loaded with torch.ops.load_library as torch.ops.tasuki.*; needs no Python headers. Threads are
// torch's own, as many as torch.set_num_threads says.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace tasuki {
namespace {

constexpr int64_t ROWS_PER_TASK = 96;  // query rows of one KV head
constexpr int64_t ELEMENTS_PER_TASK = 16384;
constexpr int64_t LEAST_LINEAR_ROWS = 96;  // per task, where there are so many: for a panel's sake
constexpr int64_t MOST_LINEAR_ROWS = 192;  // these stay near while panels pass by

template <typename T> T* elements(const at::Tensor& t) { return static_cast<T*>(t.data_ptr()); }
const float* floats(const c10::optional<at::Tensor>& t) {
  return t ? static_cast<const float*>(t->data_ptr()) : nullptr;
}

void require_kept(const at::Tensor& t, int64_t dims, const char* name) {
  TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.dim() == dims, name, " is no dense CPU tensor");
  TORCH_CHECK(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16, name,
              " must be float32 or bfloat16");
}

void require_floats(const at::Tensor& t, int64_t count, const char* name) {
  TORCH_CHECK(t.is_contiguous() && t.scalar_type() == at::kFloat && t.numel() == count, name,
              " must hold ", count, " float32");
}

void require_numbers(const at::Tensor& t, int64_t dims, const char* name) {
  TORCH_CHECK(t.is_contiguous() && t.scalar_type() == at::kLong && t.dim() == dims, name,
              " must be dense int64");
}

// Calls `work(T{})` with the element type of a kept tensor.
template <typename F>
void by_type(const at::Tensor& t, F work) {
  if (t.scalar_type() == at::kFloat) work(float{});
  else work(bf16{});
}

at::Tensor add_rms_norm(const at::Tensor& x, const c10::optional<at::Tensor>& delta,
                        const at::Tensor& weight, double eps) {
  require_kept(x, 2, "x");
  require_floats(weight, x.size(1), "weight");
  if (delta) TORCH_CHECK(delta->sizes() == x.sizes() && delta->dtype() == x.dtype() &&
                         delta->is_contiguous(), "delta must be like x");
  at::Tensor out = at::empty_like(x);
  const int64_t width = x.size(1);
  by_type(x, [&](auto kind) {
    using T = decltype(kind);
    T *rows = elements<T>(x), *results = elements<T>(out);
    const T* deltas = delta ? elements<T>(*delta) : nullptr;
    at::parallel_for(0, x.size(0), 1 + ELEMENTS_PER_TASK / width, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row)
        normalise<T>(rows + row * width, deltas ? deltas + row * width : nullptr,
                     elements<float>(weight), float(eps), results + row * width, width);
    });
  });
  return out;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return add_rms_norm(x, c10::nullopt, weight, eps);
}

at::Tensor silu_product(const at::Tensor& gate_up) {
  require_kept(gate_up, 2, "gate_up");
  const int64_t width = gate_up.size(1) / 2;
  TORCH_CHECK(gate_up.size(1) == 2 * width, "gate_up must hold two halves");
  at::Tensor out = at::empty({gate_up.size(0), width}, gate_up.options());
  by_type(gate_up, [&](auto kind) {
    using T = decltype(kind);
    const T* rows = elements<T>(gate_up);
    T* results = elements<T>(out);
    at::parallel_for(0, gate_up.size(0), 1 + ELEMENTS_PER_TASK / width,
                     [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row)
        gated<T>(rows + 2 * row * width, rows + (2 * row + 1) * width, results + row * width, width);
    });
  });
  return out;
}

// Whether `linear` is the fastest there is. AMX, where a processor has it, needs another form; without
// a multiply-add, whole lanes of them are no gain.
bool has_linear(at::ScalarType type) {
#if !defined(__AVX512F__) && !(defined(__AVX2__) && defined(__FMA__))
  return false;
#elif defined(__AMX_BF16__)
  return type == at::kFloat;
#else
  return type == at::kFloat || type == at::kBFloat16;
#endif
}

// Elements of `pack_weight`'s result.
int64_t packed_weight_size(int64_t outputs, int64_t inputs, at::ScalarType type) {
  return type == at::kFloat ? packed_size<float>(outputs, inputs)
                            : packed_size<bf16>(outputs, inputs);
}

void pack_weight(const at::Tensor& weight, const at::Tensor& packed) {
  require_kept(weight, 2, "weight");
  require_kept(packed, 1, "packed");
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  TORCH_CHECK(packed.dtype() == weight.dtype() &&
              packed.numel() == packed_weight_size(outputs, inputs, weight.scalar_type()),
              "packed must be of packed_weight_size and of weight's type");
  packed.zero_();
  by_type(weight, [&](auto kind) {
    using T = decltype(kind);
    at::parallel_for(0, ceiling(outputs, PANEL), 1, [&](int64_t from, int64_t to) {
      for (; from < to; ++from)
        pack_panel<T>(elements<T>(weight), outputs, inputs, from, elements<T>(packed));
    });
  });
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t outputs) {
  require_kept(x, 2, "x");
  require_kept(packed, 1, "packed");
  const int64_t rows = x.size(0), inputs = x.size(1), panels = ceiling(outputs, PANEL);
  TORCH_CHECK(packed.dtype() == x.dtype() && outputs > 0 && inputs > 0 &&
              packed.numel() == packed_weight_size(outputs, inputs, x.scalar_type()),
              "packed is no weight for ", inputs, " inputs and ", outputs, " outputs");
  at::Tensor y = at::empty({rows, outputs}, x.options());
  if (rows == 0) return y;
  const int64_t threads = at::get_num_threads();
  const int64_t share = std::max(ceiling(rows, threads), LEAST_LINEAR_ROWS);
  const int64_t chunks = ceiling(rows, std::min(MOST_LINEAR_ROWS, share));
  const int64_t step = ceiling(ceiling(rows, chunks), LINEAR_ROWS) * LINEAR_ROWS;
  const int64_t tasks = ceiling(rows, step) * panels;  // of nearly the same size
  by_type(x, [&](auto kind) {
    using T = decltype(kind);
    const at::Tensor given = std::is_same_v<Input<T>, T> ? x : x.to(at::kFloat);
    const int64_t per_panel = packed.numel() / panels;
    at::parallel_for(0, tasks, 1, [&](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; ++task) {
        const int64_t first = task / panels * step, panel = task % panels;
        const int64_t next = (panel + 1) % panels;
        multiply_rows<T>(std::min(step, rows - first), elements<Input<T>>(given) + first * inputs, inputs,
                         elements<T>(packed) + panel * per_panel,
                         task + 1 < to ? elements<T>(packed) + next * per_panel : nullptr,
                         elements<T>(y) + first * outputs + panel * PANEL, outputs,
                         std::min<int64_t>(PANEL, outputs - panel * PANEL));
      }
    });
  });
  return y;
}

// Some consecutive tokens of one request: a row of `entries`.
struct Entry {
  int64_t first_row, count, start, table, num_blocks;
};

// Part of an entry for one thread.
struct Task {
  const Entry* entry;
  int64_t head, first, last;  // tokens of the entry
};

struct Shape {
  int64_t layers, kv_heads, heads, group, block_size, head_dim, padded_dim, total_blocks;
};

std::vector<Entry> read_entries(const at::Tensor& entries, const at::Tensor& blocks,
                                int64_t rows, const Shape& shape, bool check_ids) {
  std::vector<Entry> read;
  const int64_t* numbers = elements<int64_t>(entries);
  for (int64_t i = 0; i < entries.size(0); ++i, numbers += 4) {
    Entry entry{numbers[0], numbers[1], numbers[2], numbers[3], 0};
    entry.num_blocks = ceiling(entry.start + entry.count, shape.block_size);
    TORCH_CHECK(entry.count > 0 && entry.start >= 0 && entry.first_row >= 0 &&
                entry.first_row + entry.count <= rows, "entry ", i, " lies outside the step");
    TORCH_CHECK(entry.table >= 0 && entry.table + entry.num_blocks <= blocks.numel(),
                "entry ", i, " has too few blocks");
    const int64_t* ids = elements<int64_t>(blocks) + entry.table;
    for (int64_t b = 0; check_ids && b < entry.num_blocks; ++b)
      TORCH_CHECK(0 <= ids[b] && ids[b] < shape.total_blocks, "block ", ids[b], " does not exist");
    read.push_back(entry);
  }
  return read;
}

std::vector<Task> cut(const std::vector<Entry>& entries, const Shape& shape) {
  std::vector<Task> tasks;
  const int64_t step = std::max<int64_t>(1, ROWS_PER_TASK / shape.group);
  for (const Entry& entry : entries)
    for (int64_t head = 0; head < shape.kv_heads; ++head)
      for (int64_t first = 0; first < entry.count; first += step)
        tasks.push_back({&entry, head, first, std::min(first + step, entry.count)});
  return tasks;
}

// What one thread works with.
struct Scratch {
  std::vector<const float*> queries;
  std::vector<int64_t> visible, places;  // places: of each row's head in the output
  std::vector<float> best, total, mixed, tile;

  void fit(int64_t rows, int64_t padded_dim) {
    queries.resize(rows);
    visible.resize(rows);
    places.resize(rows);
    best.resize(rows);
    total.resize(rows * LANES);
    mixed.resize(rows * padded_dim);
    tile.resize(2 * padded_dim * TILE);
  }

  Rows rows() { return {queries.data(), visible.data(), best.data(), total.data(), mixed.data()}; }
};

template <typename T>
struct Layer {
  Shape shape;
  T* cache;        // of this layer in block 0
  int64_t stride;  // elements from one block to the next
  const int64_t* tables;
  const T* qkv;
  float* queries;  // [rows, heads, padded_dim]
  T* out;          // [rows, heads * head_dim]

  T* keys(int64_t head) const { return cache + head * shape.block_size * shape.head_dim; }
  T* values(int64_t head) const { return keys(shape.kv_heads + head); }

  // Rotate one row's q and k, and keep its k and v in the block of its position.
  void write(const Entry& entry, int64_t token, const float* bias, const float* q_weight,
             const float* k_weight, float eps, const float* cos, const float* sin) const {
    const int64_t dims = shape.head_dim, position = entry.start + token;
    const int64_t row = entry.first_row + token;
    const T* heads = qkv + row * (shape.heads + 2 * shape.kv_heads) * dims;
    const float* c = cos + position * (dims / 2);
    const float* s = sin + position * (dims / 2);
    const float scale = 1.44269504f / std::sqrt(float(dims));
    auto biases = [&](int64_t head) { return bias ? bias + head * dims : nullptr; };
    for (int64_t head = 0; head < shape.heads; ++head) {
      float* query = queries + (row * shape.heads + head) * shape.padded_dim;
      rotated(heads + head * dims, biases(head), q_weight, eps, c, s, scale, query, dims);
      std::fill(query + dims, query + shape.padded_dim, 0.0f);
    }
    const int64_t place = tables[entry.table + position / shape.block_size] * stride;
    const int64_t offset = position % shape.block_size;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      T key[MOST_DIM];
      const int64_t k = shape.heads + head, v = k + shape.kv_heads;
      rotated(heads + k * dims, biases(k), k_weight, eps, c, s, 1.0f, key, dims);
      T* to = keys(head) + place + offset;
      for (int64_t i = 0; i < dims; ++i) to[i * shape.block_size] = key[i];
      biased(heads + v * dims, biases(v), values(head) + place + offset * dims, dims);
    }
  }

  Blocks<T> blocks_of(const Task& task) const {
    return {keys(task.head),          values(task.head), stride,
            tables + task.entry->table, shape.block_size,  shape.head_dim,
            shape.padded_dim,         task.entry->num_blocks};
  }

  // `following` is the task whose keys and values will most likely be read next.
  void compute(const Task& task, const Task& following, Scratch& scratch) const {
    const Entry& entry = *task.entry;
    const int64_t dims = shape.head_dim, count = (task.last - task.first) * shape.group;
    scratch.fit(count, shape.padded_dim);
    for (int64_t row = 0; row < count; ++row) {
      const int64_t token = task.first + row / shape.group;
      const int64_t head = task.head * shape.group + row % shape.group;
      scratch.places[row] = (entry.first_row + token) * shape.heads + head;
      scratch.queries[row] = queries + scratch.places[row] * shape.padded_dim;
      scratch.visible[row] = entry.start + token + 1;
    }
    attend(count, scratch.rows(), blocks_of(task), blocks_of(following).tile(0),
           scratch.tile.data());
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < dims; ++i)
        put(out + scratch.places[row] * dims + i, scratch.mixed[row * shape.padded_dim + i]);
  }
};

at::Tensor attention(const at::Tensor& qkv, const c10::optional<at::Tensor>& bias,
                     const c10::optional<at::Tensor>& q_norm,
                     const c10::optional<at::Tensor>& k_norm, double eps, const at::Tensor& cos,
                     const at::Tensor& sin, const at::Tensor& entries, const at::Tensor& blocks,
                     const at::Tensor& cache, int64_t layer, int64_t num_heads) {
  require_kept(qkv, 2, "qkv");
  require_kept(cache, 5, "cache");
  require_numbers(entries, 2, "entries");
  require_numbers(blocks, 1, "blocks");
  TORCH_CHECK(cache.dtype() == qkv.dtype(), "cache and qkv must be of one type");
  TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes(), "cos and sin must be tables");
  Shape shape{cache.size(1), cache.size(3), num_heads, 0, 0, 2 * cos.size(1), 0, cache.size(0)};
  const int64_t dims = shape.head_dim, rows = qkv.size(0);
  require_floats(cos, cos.size(0) * (dims / 2), "cos");
  require_floats(sin, cos.numel(), "sin");
  TORCH_CHECK(0 < dims && dims <= MOST_DIM, "head_dim must be at most ", MOST_DIM);
  TORCH_CHECK(cache.size(2) == 2 && cache.size(4) % dims == 0 && 0 <= layer && layer < shape.layers,
              "the cache is not of this model");
  shape.block_size = cache.size(4) / dims;
  shape.group = num_heads / shape.kv_heads;
  shape.padded_dim = ceiling(dims, LANES) * LANES;
  TORCH_CHECK(shape.block_size && TILE % shape.block_size == 0, "block_size must divide ", TILE);
  TORCH_CHECK(shape.group * shape.kv_heads == num_heads, "query heads must be shared evenly");
  const int64_t width = (num_heads + 2 * shape.kv_heads) * dims;
  TORCH_CHECK(qkv.size(1) == width, "qkv must be ", width, " wide");
  TORCH_CHECK(entries.size(1) == 4, "an entry has four numbers");
  if (bias) require_floats(*bias, width, "bias");
  if (q_norm) require_floats(*q_norm, dims, "q_norm");
  if (k_norm) require_floats(*k_norm, dims, "k_norm");

  const std::vector<Entry> read = read_entries(entries, blocks, rows, shape, layer == 0);
  for (const Entry& entry : read)
    TORCH_CHECK(entry.start + entry.count <= cos.size(0), "a position is beyond the rotary table");
  at::Tensor out = at::zeros({rows, num_heads * dims}, qkv.options());
  at::Tensor queries = at::empty({rows, num_heads, shape.padded_dim}, cos.options());
  by_type(qkv, [&](auto kind) {
    using T = decltype(kind);
    const int64_t per_layer = 2 * shape.kv_heads * cache.size(4);
    const Layer<T> work{shape, elements<T>(cache) + layer * per_layer, shape.layers * per_layer,
                        elements<int64_t>(blocks), elements<T>(qkv), elements<float>(queries),
                        elements<T>(out)};
    std::vector<std::pair<const Entry*, int64_t>> tokens;
    for (const Entry& entry : read)
      for (int64_t token = 0; token < entry.count; ++token) tokens.push_back({&entry, token});
    at::parallel_for(0, tokens.size(), 1 + ELEMENTS_PER_TASK / width, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        work.write(*tokens[i].first, tokens[i].second, floats(bias), floats(q_norm), floats(k_norm),
                   float(eps), elements<float>(cos), elements<float>(sin));
    });
    // Later tokens see more: threads take tasks as they come. Who computes a row changes nothing.
    const std::vector<Task> tasks = cut(read, shape);
    std::atomic<size_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t from, int64_t to) {
      Scratch scratch;
      for (; from < to; ++from)
        for (size_t task; (task = next++) < tasks.size();)
          work.compute(tasks[task], tasks[std::min(task + 1, tasks.size() - 1)], scratch);
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(tasuki, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm);
  library.def("add_rms_norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps) -> Tensor",
              add_rms_norm);
  library.def("silu_product(Tensor gate_up) -> Tensor", silu_product);
  library.def("instructions() -> str", [] { return std::string(INSTRUCTIONS); });
  library.def("has_linear(ScalarType dtype) -> bool", has_linear);
  library.def("packed_weight_size(int outputs, int inputs, ScalarType dtype) -> int",
              packed_weight_size);
  library.def("pack_weight(Tensor weight, Tensor(a!) packed) -> ()", pack_weight);
  library.def("linear(Tensor x, Tensor packed, int outputs) -> Tensor", linear);
  library.def(
      "attention(Tensor qkv, Tensor? bias, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, "
      "Tensor sin, Tensor entries, Tensor blocks, Tensor(a!) cache, int layer, int num_heads) "
      "-> Tensor",
      attention);
}

}  // namespace tasuki
