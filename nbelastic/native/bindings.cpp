// What Python sees of the core. All calls that wait or move data are made without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <system_error>

#include "core/executor.hpp"
#include "core/lifeline.hpp"
#include "core/mail.hpp"

namespace nb = nanobind;
using namespace nbelastic;

namespace {

using Address = std::uintptr_t;
using Lengths = std::vector<std::size_t>;
using Part = std::pair<Address, std::size_t>;
using Parts = std::vector<Part>;
using Bytes = nb::ndarray<nb::array_api, std::uint8_t, nb::ndim<1>>;

constexpr auto kSum = static_cast<std::uint32_t>(Op::sum);

std::byte* pointer(Address address) { return reinterpret_cast<std::byte*>(address); }

void copy(Address target, Address source, std::size_t nbytes, bool far) {
    (far ? stream_bytes : copy_bytes)(pointer(target), pointer(source), nbytes);
}

std::vector<Piece> pieces(const Parts& pairs) {
    std::vector<Piece> all;
    all.reserve(pairs.size());
    for (const auto& [address, bytes] : pairs) all.push_back({pointer(address), bytes});
    return all;
}

class Group {
public:
    Group(int fd, std::uint32_t rank, std::uint32_t size, double timeout_s)
        : segment_(std::make_shared<Segment>(fd)),
          team_(segment_, rank, size, timeout_s),
          arena_(std::make_shared<Arena>(segment_, rank)),
          executor_(std::make_unique<Executor>(team_)),
          lifeline_(std::make_unique<Lifeline>(team_)),
          process_(getpid()) {
        lifeline_->start();
    }
    ~Group() {
        if (forked()) {  // their threads are the parent's
            executor_.release();
            lifeline_.release();
        }
        close();
    }

    Bytes empty(std::size_t bytes) {
        struct Owner {
            std::shared_ptr<Arena> arena;
            std::byte* block;
            std::size_t bytes;
        };
        auto owner = std::make_unique<Owner>(arena_, arena_->take(bytes), bytes);
        void* data = owner->block;
        nb::capsule capsule(owner.release(), [](void* it) noexcept {
            const std::unique_ptr<Owner> owner(static_cast<Owner*>(it));
            owner->arena->give_back(owner->block, owner->bytes);
        });
        return Bytes(data, {bytes}, capsule);
    }

    bool holds(Address data, std::size_t bytes) const {
        return segment_->place(team_.rank(), pointer(data), bytes) >= 0;
    }

    void allreduce(Address data, std::size_t count, std::uint32_t type, std::uint32_t op) {
        const Part whole{data, count};
        executor_->run(summing({&whole, 1}, type, op));
    }

    std::uint64_t allreduce_async(const Parts& parts, std::uint32_t type, std::uint32_t op) {
        return executor_->begin(summing(parts, type, op));
    }

    std::uint64_t allreduce_tree_async(const std::vector<Parts>& nodes, const Parts& outputs,
                                       std::shared_ptr<const Tree> tree, std::uint32_t type) {
        if (nodes.size() != nodes_in(*tree)) throw std::invalid_argument("one for each node");
        if (tree->results() != 1) throw std::invalid_argument("not the nodes of a whole tree");
        Operation its = reduction(Kind::allreduce, type, kSum, std::move(tree));
        const auto as_long = [](const Part& one, const Part& other) { return one.second == other.second; };
        for (const Parts& node : nodes) {
            if (!std::equal(node.begin(), node.end(), outputs.begin(), outputs.end(), as_long)) {
                throw std::invalid_argument("each part as long as its output");
            }
            append(node, its.type, its.inputs);
        }
        its.count = append(outputs, its.type, its.outputs);
        return executor_->begin(std::move(its));
    }

    std::uint64_t reduce_scatter_async(Address data, Lengths counts,
                                       const std::vector<Address>& outputs, std::uint32_t type,
                                       std::uint32_t op, std::shared_ptr<const Tree> tree) {
        const std::uint32_t nodes = tree ? nodes_in(*tree) : 1;
        const std::uint32_t results = tree ? tree->results() : 1;
        if (outputs.size() != results) throw std::invalid_argument("one for each result");
        Operation its = reduction(Kind::reduce_scatter, type, op, std::move(tree));
        take_parts(its, data, std::move(counts), nodes);
        const std::size_t own = its.counts[team_.rank()] * bytes_of(its.type);
        for (const Address output : outputs) its.outputs.push_back({pointer(output), own});
        return executor_->begin(std::move(its));
    }

    std::uint64_t gather_parts_async(Address data, Lengths counts, std::uint32_t type) {
        Operation its = reduction(Kind::gather_parts, type, kSum);
        take_parts(its, data, std::move(counts), 1);
        return executor_->begin(std::move(its));
    }

    std::uint64_t broadcast_async(Address data, std::size_t bytes, std::uint32_t root) {
        if (root >= team_.size()) throw std::invalid_argument("no such root");
        Operation its{.kind = Kind::broadcast, .root = root, .data = pointer(data), .count = bytes};
        return executor_->begin(std::move(its));
    }

    std::uint64_t allgather_async(const std::vector<Address>& outputs, Address data,
                                  std::size_t bytes) {
        check_per_rank(outputs.size());
        Operation its{.kind = Kind::allgather, .data = pointer(data), .count = bytes};
        for (const Address output : outputs) its.outputs.push_back({pointer(output), bytes});
        return executor_->begin(std::move(its));
    }

    std::uint64_t all_to_all_async(const Parts& outputs, const Parts& inputs) {
        check_per_rank(outputs.size());
        check_per_rank(inputs.size());
        Operation its{.kind = Kind::all_to_all};
        its.outputs = pieces(outputs);
        its.inputs = pieces(inputs);
        return executor_->begin(std::move(its));
    }

    std::vector<nb::bytes> share(nb::bytes record) {
        if (record.size() > kSmallBytes) throw std::invalid_argument("the record is too long");
        std::vector<std::string> records(team_.size());
        Operation its{.kind = Kind::share, .count = record.size(), .records = records};
        its.data = reinterpret_cast<std::byte*>(const_cast<char*>(record.c_str()));  // only read
        {
            const nb::gil_scoped_release released;
            executor_->run(std::move(its));
        }
        std::vector<nb::bytes> all;
        for (const std::string& each : records) all.emplace_back(each.data(), each.size());
        return all;
    }

    std::uint64_t barrier_async() { return executor_->begin({.kind = Kind::barrier}); }

    void send(const Parts& parts, std::uint32_t to) {
        check_peer(to);
        nbelastic::send(team_, pieces(parts), to);
    }

    void receive(Address data, std::size_t bytes, std::uint32_t source) {
        check_peer(source);
        nbelastic::receive(team_, pointer(data), bytes, source);
    }

    bool done(std::uint64_t ticket) const { return executor_->done(ticket); }
    void wait(std::uint64_t ticket) { executor_->wait(ticket); }
    bool waiting() const { return executor_->waiting(); }

    std::optional<std::string> failure() const {
        if (!team_.broken()) return std::nullopt;
        return team_.reason();
    }

    void abort(const std::string& reason, bool differ) { team_.abort(reason, differ); }

    std::vector<std::uint32_t> dead() const { return lifeline_->dead(); }

    void close() {
        if (closed_ || forked()) return;
        closed_ = true;
        if (executor_->idle()) {
            team_.leave();
        } else {
            team_.abort("rank " + std::to_string(team_.rank()) +
                        " of this host has left in the middle of an operation");
        }
        executor_->close();
        lifeline_->stop();
    }

private:
    bool forked() const { return getpid() != process_; }

    static Operation reduction(Kind kind, std::uint32_t type, std::uint32_t op,
                               std::shared_ptr<const Tree> tree = nullptr) {
        if (type >= kTypes || op >= kOps || kernels().of[type][op] == nullptr) {
            throw std::invalid_argument("no such reduction for this type");
        }
        return {.kind = kind, .type = static_cast<Type>(type), .op = static_cast<Op>(op),
                .tree = std::move(tree)};
    }

    static Operation summing(std::span<const Part> parts, std::uint32_t type, std::uint32_t op) {
        Operation its = reduction(Kind::allreduce, type, op);
        its.count = append(parts, its.type, its.inputs);
        return its;
    }

    // Adds parts of so many values each, unless empty; returns how many values there are.
    static std::size_t append(std::span<const Part> parts, Type type, std::vector<Piece>& to) {
        std::size_t total = 0;
        for (const auto& [address, count] : parts) {
            if (count > 0) to.push_back({pointer(address), count * bytes_of(type)});
            total += count;
        }
        return total;
    }

    // Has an operation work on memory in the segment that has a part for each rank, so many times.
    void take_parts(Operation& its, Address data, Lengths counts, std::size_t times) const {
        check_per_rank(counts.size());
        its.count = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
        its.counts = std::move(counts);
        if (times == 0) return;
        if (!holds(data, times * its.count * bytes_of(its.type))) {
            throw std::invalid_argument("the memory is not in the segment");
        }
        its.data = pointer(data);
    }

    std::uint32_t nodes_in(const Tree& tree) const {
        check_per_rank(tree.ranks());
        return tree.nodes(team_.rank());
    }

    void check_per_rank(std::size_t given) const {
        if (given != team_.size()) throw std::invalid_argument("one for each rank of the segment");
    }

    void check_peer(std::uint32_t peer) const {
        if (peer >= team_.size() || peer == team_.rank()) throw std::invalid_argument("no such peer");
    }

    std::shared_ptr<Segment> segment_;
    Team team_;
    std::shared_ptr<Arena> arena_;
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<Lifeline> lifeline_;
    pid_t process_;
    bool closed_ = false;
};

template <std::size_t n>
nb::dict codes(const char* const (&names)[n]) {
    nb::dict all;
    for (std::size_t code = 0; code < n; ++code) all[names[code]] = code;
    return all;
}

}  // namespace

NB_MODULE(_core, m) {
    using NoGil = nb::call_guard<nb::gil_scoped_release>;
    static const nb::handle errors = nb::module_::import_("nbelastic.errors").release();
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const Disagreement& e) {
            PyErr_SetString(errors.attr("RanksDisagree").ptr(), e.what());
        } catch (const Broken& e) {
            PyErr_SetString(errors.attr("CollectiveError").ptr(), e.what());
        } catch (const std::system_error& e) {
            errno = e.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
        }
    });
    nb::set_leak_warnings(false);  // whoever exits in the middle of a job has groups left
    m.attr("TYPES") = codes(kTypeNames);
    m.attr("OPS") = codes(kOpNames);
    m.def("create", &Segment::create);
    m.def("copy", &copy, NoGil());
    nb::class_<Tree>(m, "Tree")
        .def(nb::init<const std::vector<std::uint32_t>&, const std::vector<std::uint32_t>&,
                      std::vector<std::uint8_t>>());
    nb::class_<Group>(m, "Group")
        .def(nb::init<int, std::uint32_t, std::uint32_t, double>())
        .def("empty", &Group::empty)
        .def("holds", &Group::holds)
        .def("allreduce", &Group::allreduce, NoGil())
        .def("allreduce_async", &Group::allreduce_async, NoGil())
        .def("reduce_scatter_async", &Group::reduce_scatter_async, nb::arg("ptr"), nb::arg("counts"),
             nb::arg("outputs"), nb::arg("type"), nb::arg("op"), nb::arg("tree") = nullptr, NoGil())
        .def("gather_parts_async", &Group::gather_parts_async, NoGil())
        .def("allreduce_tree_async", &Group::allreduce_tree_async, NoGil())
        .def("broadcast_async", &Group::broadcast_async, NoGil())
        .def("allgather_async", &Group::allgather_async, NoGil())
        .def("all_to_all_async", &Group::all_to_all_async, NoGil())
        .def("share", &Group::share)
        .def("barrier_async", &Group::barrier_async, NoGil())
        .def("send", &Group::send, NoGil())
        .def("receive", &Group::receive, NoGil())
        .def("done", &Group::done)
        .def("wait", &Group::wait, NoGil())
        .def_prop_ro("waiting", &Group::waiting)
        .def_prop_ro("failure", &Group::failure)
        .def_prop_ro("dead", &Group::dead)
        .def("abort", &Group::abort, nb::arg("reason"), nb::arg("differ") = false)
        .def("close", &Group::close, NoGil());
}
