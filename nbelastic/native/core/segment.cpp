#include "segment.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace nbelastic {
namespace {

constexpr std::uint64_t kMagic = 0x6c6c61206f672073;
constexpr std::uint32_t kVersion = 6;
constexpr std::size_t kGiB = std::size_t{1} << 30;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// As much as the machine has: no process can use more, and what is not used costs nothing but
// addresses, of which a process has 128 TiB.
std::size_t room(std::uint32_t size) {
    const auto memory = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * kPage;
    return std::min(std::max(up(memory, kGiB), 4 * kGiB), (64 << 10) / size * kGiB);
}

}  // namespace

// All segments of this process, for its forks.
struct Forks {
    std::mutex mutex;
    std::vector<Segment*> segments;

    static Forks& all() {
        static Forks* forks = [] {
            pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); }, in_child);
            return new Forks;  // never destroyed: threads may fork while the process exits
        }();
        return *forks;
    }

    void add(Segment* segment) {
        const std::lock_guard lock(mutex);
        segments.push_back(segment);
    }
    void remove(Segment* segment) {
        const std::lock_guard lock(mutex);
        std::erase(segments, segment);
    }

    static void in_child() {
        for (const Segment* each : all().segments) {
            void* own = mmap(each->base_, each->total_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, each->fd_, 0);
            // A system that promises no memory that it lacks: writing ends the fork then.
            if (own == MAP_FAILED) mprotect(each->base_, each->total_, PROT_READ);
        }
        all().mutex.unlock();
    }
};

int Segment::create(std::uint32_t size) {
    if (size < 1 || size > kMostRanks) throw std::invalid_argument("1 to 256 ranks share a segment");
    const std::size_t arena = room(size);
    const std::size_t total = Offsets(size).arenas + size * (arena + kApart);
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < total) {
        errno = EFBIG;  // instead of the signal that ends the process
        fail("memfd");
    }
    const auto fd = static_cast<int>(
        syscall(SYS_memfd_create, "nbelastic", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd < 0) fail("memfd_create");
    try {
        if (ftruncate(fd, static_cast<off_t>(total)) != 0) fail("ftruncate");
        void* memory = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory == MAP_FAILED) fail("mmap");
        auto* control = new (memory) Control{};
        control->magic = kMagic;
        control->version = kVersion;
        control->size = size;
        control->arena_bytes = arena;
        munmap(memory, kPage);
        if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
            fail("F_ADD_SEALS");
        }
    } catch (...) {
        close(fd);
        throw;
    }
    return fd;
}

Segment::Segment(int fd) {
    struct stat status {};
    if (fstat(fd, &status) != 0) fail("fstat");
    total_ = static_cast<std::size_t>(status.st_size);
    if (total_ < sizeof(Control)) throw std::invalid_argument("not a segment");
    void* memory = mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) fail("mmap");
    base_ = static_cast<std::byte*>(memory);
    const Control& its = control();
    const bool valid = its.magic == kMagic && its.version == kVersion && its.size >= 1 &&
                       its.size <= kMostRanks &&
                       Offsets(its.size).arenas + its.size * (its.arena_bytes + kApart) == total_;
    if (!valid) {
        munmap(base_, total_);
        throw std::invalid_argument("not a segment of this version");
    }
    size_ = its.size;
    arena_bytes_ = its.arena_bytes;
    at_ = Offsets(size_);
    madvise(base_, total_, MADV_DONTDUMP);
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0) {
        munmap(base_, total_);
        fail("fcntl");
    }
    Forks::all().add(this);
}

Segment::~Segment() {
    Forks::all().remove(this);
    munmap(base_, total_);
    close(fd_);
}

}  // namespace nbelastic
