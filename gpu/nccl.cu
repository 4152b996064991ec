// gpu/nccl.cu - GPUs that do not reach each other's memory, as those of several machines, send through NCCL
// (comm.cuh). It is loaded at run time, so that a program that does not use it does not need it.
#include <dlfcn.h>

#include <cstdlib>

#include "comm.cuh"

namespace coat::gpu {
namespace {

// What is used of NCCL's interface, as in its documentation. It has been the same since version 2.7.
struct UniqueId {
    char bytes[128];
};
constexpr int SUCCESS = 0, IN_PROGRESS = 7, BYTE = 1;  // ncclSuccess, ncclInProgress, ncclUint8

class Library {
    void* const handle_;
    struct Symbol {
        void* address;
        template <class F> operator F() const { return reinterpret_cast<F>(address); }
    };
    Symbol find(const char* name) const {
        const Symbol found{dlsym(handle_, name)};
        if (!found.address) throw Error("The NCCL that was found has no ", name, "; update it.");
        return found;
    }
    static void* open(const std::string& file) {
        if (void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
        throw Error("NCCL (", file,
                    ") was not found, and GPUs that do not reach each other's memory need it: install the "
                    "package libnccl2, or name the file in the environment variable COAT_NCCL.");
    }

public:
    explicit Library(const std::string& file) : handle_(open(file)) {}

    int (*const get_unique_id)(UniqueId*) = find("ncclGetUniqueId");
    int (*const init_rank)(void**, int ranks, UniqueId, int rank) = find("ncclCommInitRank");
    int (*const abort)(void* communicator) = find("ncclCommAbort");
    int (*const group_start)() = find("ncclGroupStart");
    int (*const group_end)() = find("ncclGroupEnd");
    int (*const send)(const void*, size_t, int type, int peer, void*, cudaStream_t) = find("ncclSend");
    int (*const receive)(void*, size_t, int type, int peer, void*, cudaStream_t) = find("ncclRecv");
    const char* (*const error_text)(int) = find("ncclGetErrorString");

    void check(int result, const char* what) const {
        if (result == SUCCESS || result == IN_PROGRESS) return;
        throw Error("NCCL: ", what, " failed (", error_text(result),
                    "); NCCL_DEBUG=WARN in the environment makes it say more.");
    }
};

class Nccl : public Comm {
public:
    Nccl(ProcessGroup& processes, const std::string& library) : nccl_(library) {
        // NCCL's multicast adds in an order of its own, and some machines forbid it. Nothing here needs it.
        setenv("NCCL_NVLS_ENABLE", "0", 0);
        UniqueId id{};
        if (processes.rank() == 0) nccl_.check(nccl_.get_unique_id(&id), "making an id");
        id = processes.all_gather(id)[0];
        nccl_.check(nccl_.init_rank(&communicator_, processes.count(), id, processes.rank()),
                    "connecting the GPUs");
    }
    // Abort does not wait for ranks that have failed; at an orderly end there is nothing left to wait for.
    ~Nccl() override { nccl_.abort(communicator_); }

    // A group: NCCL starts all sends and receives together, so that their order cannot make ranks wait in a
    // circle.
    void exchange(const std::vector<Transfer>& transfers, cudaStream_t s) override {
        nccl_.check(nccl_.group_start(), "starting a group");
        for (const auto& [peer, send, there, sent, receive, received] : transfers) {
            if (sent) nccl_.check(nccl_.send(send, sent, BYTE, peer, communicator_, s), "sending");
            if (received)
                nccl_.check(nccl_.receive(receive, received, BYTE, peer, communicator_, s), "receiving");
        }
        nccl_.check(nccl_.group_end(), "a group of transfers");
    }

private:
    const Library nccl_;
    void* communicator_ = nullptr;
};

}  // namespace

std::unique_ptr<Comm> make_nccl(ProcessGroup& processes, const std::string& library) {
    return std::make_unique<Nccl>(processes, library);
}

}  // namespace coat::gpu
