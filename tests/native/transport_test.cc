// Ranks that sum through memory, without TensorFlow: as threads, where a sanitizer sees all that they touch, or as
// processes, also of several nodes, between which sockets take MPI's place.
// `transport_test threads|processes NODES SIZE SEED CALLS` ends with 0, or says what was wrong.

#include "transport.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "sums.h"

using namespace ringtrain;

namespace {

constexpr int64_t kMemoryBytes = int64_t{1} << 32;

#define REQUIRE(condition, ...)                 \
  do {                                          \
    if (!(condition)) {                         \
      std::fprintf(stderr, "%s: ", #condition); \
      std::fprintf(stderr, __VA_ARGS__);        \
      std::fputc('\n', stderr);                 \
      std::_Exit(1);                            \
    }                                           \
  } while (false)

struct Call {
  uint64_t meaning;
  bool may_share, in_place, gathers;
  std::vector<std::pair<Type, int64_t>> specs;
};

// The same on all ranks. Calls come again, as those of a training step do.
std::vector<Call> draw_calls(int seed, int num_calls) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % limit); };
  std::vector<Call> kinds, calls;
  for (int kind = 0; kind < 8; ++kind) {
    Call call = {static_cast<uint64_t>(below(1 << 30) * 100 + kind), below(3) > 0, below(2) > 0, kind % 4 == 3, {}};
    const int64_t num_parts = kind == 0 ? 5000 : 1 + below(12);
    const int64_t limit = kind == 0 ? 40 : kind % 3 == 0 ? 300 : kind % 3 == 1 ? 30'000 : 400'000;
    for (int64_t part = 0; part < num_parts; ++part) {
      call.specs.push_back({static_cast<Type>(below(6)), below(4) == 0 ? below(2) : below(limit)});
    }
    kinds.push_back(call);
  }
  for (int number = 0; number < num_calls; ++number) calls.push_back(kinds[below(8)]);
  return calls;
}

// Whole numbers of which all sums are exact in each type, half precision included.
std::vector<std::byte> draw_values(Type type, int64_t count, int rank, int call, size_t part) {
  std::vector<std::byte> values(count * size_of(type) + 1);
  for (int64_t i = 0; i < count; ++i) {
    const int value = static_cast<int>((i * 7 + rank * 13 + call * 3 + static_cast<int>(part)) % 32) - 12;
    std::byte* at = values.data() + i * size_of(type);
    const float single = static_cast<float>(value);
    const double wide = value;
    const int32_t whole = value;
    const int64_t long_whole = value;
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    uint16_t half = static_cast<uint16_t>(bits >> 16);
    if (type == Type::kHalf) {
      const uint32_t size = bits & 0x7fffffff;
      half = static_cast<uint16_t>((bits >> 16 & 0x8000) | (size == 0 ? 0 : (size - (112u << 23)) >> 13));
    }
    switch (type) {
      case Type::kHalf:
      case Type::kBfloat16:
        std::memcpy(at, &half, 2);
        break;
      case Type::kFloat:
        std::memcpy(at, &single, 4);
        break;
      case Type::kDouble:
        std::memcpy(at, &wide, 8);
        break;
      case Type::kInt32:
        std::memcpy(at, &whole, 4);
        break;
      case Type::kInt64:
        std::memcpy(at, &long_whole, 8);
        break;
    }
  }
  return values;
}

// Of sums of numbers of which none is exact: the ranks' own, the bits of whose sums all must have.
uint64_t digest_of_fractions(Transport& transport, std::mt19937& random) {
  std::uniform_real_distribution<float> fraction(-1, 1);
  uint64_t digest = 14695981039346656037u;
  for (int64_t count : {1'000, 7'777, 500'000}) {
    std::vector<float> values(count);
    for (float& value : values) value = fraction(random);
    std::byte* data = reinterpret_cast<std::byte*>(values.data());
    double squares;
    Parts parts = {{Type::kFloat, count, data, 1.0 / 3, data}};
    transport.lay_out(parts);
    Error error = transport.begin(count, parts, false);
    if (error.empty()) error = transport.finish(parts, &squares);
    REQUIRE(error.empty(), "%s", error.c_str());
    uint32_t bits;
    for (float value : values) {
      std::memcpy(&bits, &value, sizeof bits);
      digest = (digest ^ bits) * 0x100000001b3u;
    }
  }
  return digest;
}

struct Held {  // a result that is in use, and what it must still be
  Result* result;
  std::vector<std::pair<const std::byte*, std::vector<std::byte>>> contents;
};

void run_rank(const Map& map, int rank, const std::vector<int>& processes, int seed, int num_calls,
              const Nodes& nodes = {}, int node = 0, uint64_t* digests = nullptr) {
  const int local_size = static_cast<int>(processes.size());
  const int size = local_size * nodes.count, global_rank = node * local_size + rank;
  auto transport = Transport::open(map, rank, processes, {20'000}, nodes);
  REQUIRE(transport != nullptr, "rank %d cannot map the window", rank);
  std::deque<Held> held;
  std::mt19937 random(seed * 1000 + global_rank);
  int number = 0, num_shared = 0;
  for (const Call& call : draw_calls(seed, num_calls)) {
    ++number;
    std::vector<std::vector<std::byte>> inputs, outputs, expected;
    Parts parts;
    std::vector<double> squares(call.specs.size());
    const bool gathers = call.gathers && nodes.count == 1, in_place = call.in_place && !gathers;
    for (size_t index = 0; index < call.specs.size(); ++index) {
      const auto [type, count] = call.specs[index];
      if (gathers) {  // of this rank are the values between two of the places where the whole is cut
        expected.push_back(draw_values(type, count, 0, number, index));
        const int64_t unit = size_of(type), begin = count * rank / size * unit, end = count * (rank + 1) / size * unit;
        inputs.emplace_back(expected.back().begin() + begin, expected.back().begin() + end);
        inputs.back().push_back(std::byte{});
        outputs.emplace_back(count * unit + 1);
        parts.push_back({type, count, inputs.back().data()});
        parts.back().begin = begin;
        parts.back().given = end - begin;
        continue;
      }
      std::vector<std::vector<std::byte>> of_ranks;
      std::vector<const std::byte*> sources;
      for (int other = 0; other < size; ++other) of_ranks.push_back(draw_values(type, count, other, number, index));
      for (const auto& values : of_ranks) sources.push_back(values.data());
      expected.emplace_back(count * size_of(type) + 1);
      const double scale = index % 3 == 1 ? 0.5 : 1;
      add_values(type, sources, count, scale, expected.back().data());
      inputs.push_back(of_ranks[global_rank]);
      outputs.emplace_back(in_place ? 0 : count * size_of(type) + 1);
      parts.push_back({type, count, inputs.back().data(), scale});
    }
    transport->lay_out(parts, gathers);
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
    Error error = transport->begin(call.meaning, parts, call.may_share);
    REQUIRE(error.empty(), "rank %d, call %d: %s", rank, number, error.c_str());
    Result* result = transport->result();
    for (size_t index = 0; index < parts.size() && result == nullptr; ++index) {
      parts[index].out = in_place ? inputs[index].data() : outputs[index].data();
    }
    error = transport->finish(parts, squares.data());
    REQUIRE(error.empty(), "rank %d, call %d: %s", rank, number, error.c_str());
    Held now = {result, {}};
    for (size_t index = 0; index < parts.size(); ++index) {
      const Part& part = parts[index];
      const std::byte* sum = result == nullptr ? part.out : result->read + part.offset;
      REQUIRE(std::memcmp(sum, expected[index].data(), part.bytes()) == 0, "rank %d, call %d, part %zu of type %d",
              rank, number, index, static_cast<int>(part.type));
      const bool is_whole = part.type == Type::kInt32 || part.type == Type::kInt64;
      std::vector<std::byte> copy(part.bytes());
      const double true_squares = add_values(part.type, {expected[index].data()}, part.count, 1, copy.data());
      REQUIRE(is_whole || gathers || std::abs(squares[index] - true_squares) <= 1e-6 * true_squares,
              "rank %d, call %d: %g", rank, number, squares[index]);
      if (result != nullptr && index < 20) now.contents.push_back({sum, expected[index]});
    }
    if (result != nullptr) {
      ++num_shared;
      result->uses.fetch_add(1);
      held.push_back(std::move(now));
    }
    while (held.size() > random() % 3) {
      for (const auto& [at, content] : held.front().contents) {
        REQUIRE(std::memcmp(at, content.data(), content.size() - 1) == 0, "rank %d: a result has changed", rank);
      }
      held.front().result->uses.fetch_sub(1);
      held.pop_front();
    }
  }
  REQUIRE(num_shared > 0 || num_calls < 100, "no sum was shared");
  if (digests != nullptr) digests[global_rank] = digest_of_fractions(*transport, random);
}

// One rank that means something else is an error on all, and so is one that has ended.
void run_wrong_rank(const Map& map, int rank, const std::vector<int>& processes, bool has_ended) {
  auto transport = Transport::open(map, rank, processes, {20'000});
  float value = 1;
  double squares;
  Parts parts = {{Type::kFloat, 1, reinterpret_cast<std::byte*>(&value), 1, reinterpret_cast<std::byte*>(&value)}};
  transport->lay_out(parts);
  REQUIRE(transport->begin(1, parts, false).empty() && transport->finish(parts, &squares).empty(), "rank %d", rank);
  if (rank == 1 && has_ended) std::_Exit(0);
  const Error error = transport->begin(rank == 1 ? 2 : 1, parts, false);
  const char* expected =
      has_ended ? "a rank has ended that others wait for: rank 1" : "the ranks are at different places";
  REQUIRE(error.find(expected) == 0, "rank %d: %s", rank, error.c_str());
  REQUIRE(transport->begin(1, parts, false) == error, "rank %d goes on", rank);
}

// And one that cannot go on within a sum of many chunks.
void run_failing_rank(const Map& map, int rank, const std::vector<int>& processes) {
  auto transport = Transport::open(map, rank, processes, {20'000});
  std::vector<float> values(1'000'000, 1.0f);
  double squares;
  std::byte* data = reinterpret_cast<std::byte*>(values.data());
  Parts parts = {{Type::kFloat, static_cast<int64_t>(values.size()), data, 1, data}};
  REQUIRE(!transport->lay_out(parts), "that is not short");
  REQUIRE(transport->begin(1, parts, true).empty(), "rank %d", rank);
  if (rank == 1) return transport->fail();
  const Error error = transport->finish(parts, &squares);
  const char* expected = "a rank has ended that others wait for: rank 1, where a sum could not be finished";
  REQUIRE(error == expected, "rank %d: %s", rank, error.c_str());
}

// Sockets between all nodes, for one local rank: [from][to].
using Sockets = std::vector<std::vector<int>>;

Sockets connect_nodes(int count) {
  Sockets sockets(count, std::vector<int>(count, -1));
  for (int first = 0; first < count; ++first) {
    for (int second = first + 1; second < count; ++second) {
      int pair[2];
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
      sockets[first][second] = pair[0];
      sockets[second][first] = pair[1];
    }
  }
  return sockets;
}

void transfer(bool sends, int socket, std::byte* at, int64_t left) {
  while (left > 0) {
    const ssize_t length = sends ? write(socket, at, left) : read(socket, at, left);
    REQUIRE(length > 0, "%s", sends ? "write" : "read");
    at += length, left -= length;
  }
}

// What MPI_Allreduce does: the first node adds.
bool add_by_sockets(const std::vector<int>& sockets, int node, Type type, std::byte* values, int64_t count) {
  std::vector<std::byte> received(count * size_of(type));
  for (size_t other = 1; other < sockets.size() && node == 0; ++other) {
    transfer(false, sockets[other], received.data(), received.size());
    add_values(type, {values, received.data()}, count, 1, values);
  }
  for (size_t other = 1; other < sockets.size() && node == 0; ++other) {
    transfer(true, sockets[other], values, received.size());
  }
  if (node == 0) return true;
  transfer(true, sockets[0], values, received.size());
  transfer(false, sockets[0], values, received.size());
  return true;
}

Map map_of_memory() {
  const int descriptor = memfd_create("transport_test", MFD_CLOEXEC);
  REQUIRE(descriptor >= 0 && ftruncate(descriptor, kMemoryBytes) == 0, "memfd");
  return [descriptor](int64_t offset, int64_t length, bool is_writable) -> std::byte* {
    const int access = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* memory = mmap(nullptr, length, access, MAP_SHARED, descriptor, offset);
    return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
  };
}

// Call `act(map, rank, processes, nodes, node)` in so many processes on each of so many nodes.
template <typename Act>
void in_processes(int num_nodes, int size, Act act) {
  std::vector<Sockets> sockets;
  for (int rank = 0; rank < size; ++rank) sockets.push_back(connect_nodes(num_nodes));
  std::vector<int> all;
  for (int node = 0; node < num_nodes; ++node) {
    const Map map = map_of_memory();
    int gate[2];
    REQUIRE(pipe(gate) == 0, "pipe");
    std::vector<int> processes;
    for (int rank = 0; rank < size; ++rank) {
      const int process = fork();
      if (process == 0) {
        std::vector<int> of_node(size);
        REQUIRE(read(gate[0], of_node.data(), size * sizeof(int)) == static_cast<ssize_t>(size * sizeof(int)), "read");
        const std::vector<int>& of_rank = sockets[rank][node];
        const auto add = [&of_rank, node](auto... what) { return add_by_sockets(of_rank, node, what...); };
        act(map, rank, of_node, Nodes{num_nodes, add}, node);
        std::exit(0);
      }
      processes.push_back(process);
    }
    for (int rank = 0; rank < size; ++rank) {
      REQUIRE(write(gate[1], processes.data(), size * sizeof(int)) > 0, "write");
    }
    all.insert(all.end(), processes.begin(), processes.end());
  }
  for (int process : all) {
    int status;
    REQUIRE(waitpid(process, &status, 0) == process && status == 0, "a rank ended with status %d", status);
  }
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 6, "five arguments");
  const std::string how = argv[1];
  const int num_nodes = std::atoi(argv[2]), size = std::atoi(argv[3]);
  const int seed = std::atoi(argv[4]), num_calls = std::atoi(argv[5]);
  alarm(240);
  const int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  REQUIRE(memory != MAP_FAILED, "mmap");
  if (how == "threads") {  // one mapping: a sanitizer takes two of the same memory for different places
    const Map map = [memory](int64_t offset, int64_t, bool) { return static_cast<std::byte*>(memory) + offset; };
    std::vector<std::thread> threads;
    const std::vector<int> processes(size, getpid());
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] { run_rank(map, rank, processes, seed, num_calls); });
    }
    for (std::thread& thread : threads) thread.join();
    return 0;
  }
  uint64_t* digests = static_cast<uint64_t*>(memory);
  const auto run = [&](const Map& map, int rank, const std::vector<int>& processes, const Nodes& nodes, int node) {
    run_rank(map, rank, processes, seed, num_calls, nodes, node, digests);
  };
  in_processes(num_nodes, size, run);
  for (int rank = 0; rank < num_nodes * size; ++rank)
    REQUIRE(digests[rank] == digests[0], "rank %d has other bits", rank);
  if (num_nodes > 1) return 0;
  for (bool has_ended : {false, true}) {
    in_processes(1, size, [&](const Map& map, int rank, const std::vector<int>& processes, const Nodes&, int) {
      run_wrong_rank(map, rank, processes, has_ended);
    });
  }
  in_processes(1, size, [&](const Map& map, int rank, const std::vector<int>& processes, const Nodes&, int) {
    run_failing_rank(map, rank, processes);
  });
  return 0;
}
