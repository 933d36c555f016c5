// Ranks as threads of one process, so that sanitizers see all that they do to each other.
//
//     stress ROUNDS [SEED]
//
// Each round has a segment, some ranks, and a list of operations, drawn by the seed. Results are
// checked; in some rounds a rank leaves early, or somebody breaks the segment at some moment.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>

#include "core/executor.hpp"
#include "core/lifeline.hpp"
#include "core/mail.hpp"

using namespace nbelastic;

namespace {

using Random = std::mt19937_64;

std::size_t draw(Random& random, std::size_t most) { return random() % (most + 1); }

[[noreturn]] void wrong(const char* what) {
    std::fprintf(stderr, "wrong: %s\n", what);
    std::abort();
}

void require(bool holds, const char* what) {
    if (!holds) wrong(what);
}

std::size_t some_count(Random& random) {
    constexpr std::size_t limits[] = {1, 16, 4'000, 40'000, 700'000};
    return 1 + draw(random, limits[draw(random, 4)]);
}

// One rank's part in a round.
class Member {
public:
    Member(std::shared_ptr<Segment> segment, std::uint32_t rank, std::uint32_t size, std::uint64_t seed)
        : team_(segment, rank, size, 60.0), lifeline_(team_),
          arena_(std::move(segment), rank), executor_(team_), random_(seed) {
        lifeline_.start();
    }

    Team& team() { return team_; }
    std::vector<std::uint32_t> dead() const { return lifeline_.dead(); }

    void play(std::size_t operations, bool leaves_early) {
        try {
            const std::size_t mine = leaves_early ? operations / 2 : operations;
            for (std::size_t i = 0; i < mine; ++i) one();
            // Messages pass by a rank that has left; what all take part in does not.
            if (!leaves_early) run({.kind = Kind::barrier}, false);
        } catch (const Broken&) {
            broken_ = true;
        }
        finish();
    }

    bool broken() const { return broken_; }

private:
    std::uint32_t n() const { return team_.size(); }
    std::uint32_t me() const { return team_.rank(); }

    // A buffer in the segment, or not, until the operation is over; what ranks choose may differ.
    template <class T>
    T* buffer(std::size_t count, bool inside) {
        if (!inside) {
            heap_.emplace_back(count * sizeof(T));
            return reinterpret_cast<T*>(heap_.back().data());
        }
        auto* block = arena_.take(count * sizeof(T));
        blocks_.push_back({block, count * sizeof(T)});
        return reinterpret_cast<T*>(block);
    }

    void one() {
        const auto what = draw(random_, 8);
        const std::size_t count = some_count(random_);
        const auto root = static_cast<std::uint32_t>(draw(random_, n() - 1));
        const bool begun = draw(random_, 1) == 0;
        switch (what) {
            case 0: allreduce<float>(Type::f32, count, begun); break;
            case 1: allreduce<std::int64_t>(Type::i64, count, begun); break;
            case 2: broadcast(count, root, begun); break;
            case 3: allgather(count, begun); break;
            case 4: parts(count); break;
            case 5: exchange(count); break;
            case 6: message(count); break;
            case 7: along_tree(count, begun); break;
            default: run({.kind = Kind::barrier}, begun);
        }
        for (const auto& [block, bytes] : blocks_) arena_.give_back(block, bytes);
        blocks_.clear();
        heap_.clear();
    }

    void run(Operation operation, bool begun) {
        try {
            if (begun) {
                executor_.wait(executor_.begin(std::move(operation)));
            } else {
                executor_.run(std::move(operation));
            }
        } catch (const Broken&) {
            executor_.close();  // until then the buffers are not the caller's
            throw;
        }
    }

    template <class T>
    void allreduce(Type type, std::size_t count, bool begun) {
        T* data = buffer<T>(count, (random_() + me()) % 3 != 0);
        for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<T>(i % 7 + me());
        auto* bytes = reinterpret_cast<std::byte*>(data);
        Operation its{.kind = Kind::allreduce, .type = type, .op = Op::sum, .count = count};
        Random own(random_() + me());  // in one piece or several, as each rank likes
        for (std::size_t done = 0; done < count;) {
            const bool all = draw(own, 1) == 0;
            const std::size_t n = all ? count - done : 1 + draw(own, count - done - 1);
            its.inputs.push_back({bytes + done * sizeof(T), n * sizeof(T)});
            done += n;
        }
        run(std::move(its), begun);
        const std::uint32_t extra = n() * (n() - 1) / 2;
        for (std::size_t i = 0; i < count; ++i) {
            require(data[i] == static_cast<T>(i % 7 * n() + extra), "allreduce");
        }
    }

    void along_tree(std::size_t count, bool begun) {
        std::vector<std::uint32_t> leaves;
        for (std::uint32_t rank = 0; rank < n(); ++rank) {
            leaves.push_back(static_cast<std::uint32_t>(draw(random_, 5)));
        }
        leaves[draw(random_, n() - 1)] += 1;  // some rank has one
        const std::uint32_t all = std::accumulate(leaves.begin(), leaves.end(), 0u);
        std::vector<std::uint8_t> order(all, 1);  // each leaf is added to those before it
        order[0] = 0;
        const bool inside = (random_() + me()) % 3 != 0;
        const std::uint32_t first = std::accumulate(leaves.begin(), leaves.begin() + me(), 0u);
        Operation its{.kind = Kind::allreduce, .type = Type::f32, .op = Op::sum, .count = count};
        its.tree = std::make_shared<const Tree>(leaves, leaves, order);
        Random own(random_() + me());  // in one piece or two, as each rank likes
        const std::size_t cut = count > 1 && draw(own, 1) == 0 ? 1 + draw(own, count - 2) : count;
        const auto add = [&](float* vector, std::vector<Piece>& to) {
            auto* bytes = reinterpret_cast<std::byte*>(vector);
            to.push_back({bytes, cut * sizeof(float)});
            if (cut < count) to.push_back({bytes + cut * sizeof(float), (count - cut) * sizeof(float)});
        };
        auto* output = buffer<float>(count, inside);
        for (std::uint32_t k = 0; k < leaves[me()]; ++k) {
            auto* node = buffer<float>(count, inside);
            for (std::size_t i = 0; i < count; ++i) node[i] = static_cast<float>(i % 7 + first + k);
            add(node, its.inputs);
            if (k == 0 && draw(own, 1) == 0) output = node;
        }
        add(output, its.outputs);
        run(std::move(its), begun);
        for (std::size_t i = 0; i < count; ++i) {
            const auto total = static_cast<float>(i % 7 * all + all * (all - 1) / 2);
            require(output[i] == total, "along a tree");
        }
    }

    void broadcast(std::size_t count, std::uint32_t root, bool begun) {
        std::vector<std::byte> data(count, std::byte(me() == root ? 42 : 0));
        run({.kind = Kind::broadcast, .root = root, .data = data.data(), .count = count}, begun);
        for (const std::byte each : data) require(each == std::byte{42}, "broadcast");
    }

    void allgather(std::size_t count, bool begun) {
        std::vector<std::byte> own(count, std::byte(me()));
        std::vector<std::vector<std::byte>> all(n(), std::vector<std::byte>(count));
        Operation its{.kind = Kind::allgather, .data = own.data(), .count = count};
        for (auto& each : all) its.outputs.push_back({each.data(), count});
        run(std::move(its), begun);
        for (std::uint32_t rank = 0; rank < n(); ++rank) {
            for (const std::byte each : all[rank]) require(each == std::byte(rank), "allgather");
        }
    }

    void parts(std::size_t count) {
        auto* data = buffer<float>(count * n(), true);
        auto* block = reinterpret_cast<std::byte*>(data);
        for (std::size_t i = 0; i < count * n(); ++i) data[i] = static_cast<float>(i % 5 + me());
        Operation its{.kind = Kind::reduce_scatter, .type = Type::f32, .op = Op::sum, .data = block,
                      .count = count * n()};
        its.counts.assign(n(), count);
        Operation gather = its;
        its.outputs.push_back({block + me() * count * sizeof(float), count * sizeof(float)});
        gather.kind = Kind::gather_parts;
        run(std::move(its), false);
        run(std::move(gather), true);
        const std::uint32_t extra = n() * (n() - 1) / 2;
        for (std::size_t i = 0; i < count * n(); ++i) {
            require(data[i] == static_cast<float>(i % 5 * n() + extra), "parts");
        }
    }

    void exchange(std::size_t count) {
        Operation its{.kind = Kind::all_to_all};
        std::vector<std::vector<std::byte>> in(n()), out(n());
        for (std::uint32_t rank = 0; rank < n(); ++rank) {
            in[rank].assign(count / (rank + me() + 1), std::byte(me()));
            out[rank].resize(count / (rank + me() + 1));
            its.inputs.push_back({in[rank].data(), in[rank].size()});
            its.outputs.push_back({out[rank].data(), out[rank].size()});
        }
        run(std::move(its), true);
        for (std::uint32_t rank = 0; rank < n(); ++rank) {
            for (const std::byte each : out[rank]) require(each == std::byte(rank), "all-to-all");
        }
    }

    void message(std::size_t count) {
        const std::uint32_t to = (me() + 1) % n();
        const std::uint32_t source = (me() + n() - 1) % n();
        std::vector<std::byte> sent(count, std::byte(me()));
        std::vector<std::byte> got(count);
        std::thread lane([&] {
            try {
                send(team_, {{sent.data(), count / 2}, {sent.data() + count / 2, count - count / 2}}, to);
            } catch (const Broken&) {
                // so does receive()
            }
        });
        try {
            receive(team_, got.data(), count, source);
        } catch (const Broken&) {
            lane.join();
            throw;
        }
        lane.join();
        team_.check();
        for (const std::byte each : got) require(each == std::byte(source), "message");
    }

    void finish() {
        if (broken_) {
            team_.abort("a rank has failed");
        } else {
            team_.leave();
        }
        executor_.close();
    }

    Team team_;
    Lifeline lifeline_;
    Arena arena_;
    Executor executor_;
    Random random_;
    std::vector<std::pair<std::byte*, std::size_t>> blocks_;
    std::vector<std::vector<std::byte>> heap_;
    bool broken_ = false;
};

void round(Random& random) {
    const auto size = static_cast<std::uint32_t>(2 + draw(random, 3));
    const std::uint64_t seed = random();
    const std::size_t operations = 1 + draw(random, 30);
    const std::size_t fate = draw(random, 3);  // 0, 1: nothing; 2: a rank leaves; 3: an abort
    const auto moment = std::chrono::microseconds(draw(random, 3000));
    const int fd = Segment::create(size + static_cast<std::uint32_t>(draw(random, 2)));
    auto segment = std::make_shared<Segment>(fd);
    close(fd);
    std::vector<std::unique_ptr<Member>> members;
    for (std::uint32_t rank = 0; rank < size; ++rank) {
        members.push_back(std::make_unique<Member>(segment, rank, size, seed));
    }
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] { members[rank]->play(operations, fate == 2 && rank == 0); });
    }
    if (fate == 3) {
        std::this_thread::sleep_for(moment);
        members[0]->team().abort("the test breaks it");
    }
    for (auto& thread : threads) thread.join();
    if (fate < 2) {
        for (const auto& member : members) require(!member->broken(), "nobody broke this one");
        require(members[0]->dead().empty(), "nobody has died");
    }
    if (fate == 2) {
        for (std::uint32_t rank = 1; rank < size; ++rank) {
            require(members[rank]->broken(), "one has left, and nobody noticed");
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: stress ROUNDS [SEED]\n");
        return 2;
    }
    const long rounds = std::strtol(argv[1], nullptr, 10);
    Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
    for (long i = 0; i < rounds; ++i) round(random);
    std::printf("%ld rounds, %s loops\n", rounds, kernels().name);
    return 0;
}
