// gpu/nccl.cu - GPUs that do not reach each other's memory, as those of several machines, send through NCCL
// (peers.cuh). It is loaded at run time, so that a program that does not use it does not need it.
#include <cstdlib>

#include "peers.cuh"

namespace coat::gpu {
namespace {

// What is used of NCCL's interface, as in its documentation. It has been the same since version 2.7.
struct UniqueId {
    char bytes[128];
};
template <class Data> using Move = int(Data, size_t, int type, int peer, void* communicator, cudaStream_t);
constexpr int SUCCESS = 0, IN_PROGRESS = 7, BYTE = 1;  // ncclSuccess, ncclInProgress, ncclUint8

class Nccl : public Peers {
public:
    Nccl(const Setup& s, cudaStream_t compute, const std::string& file)
        : Peers(s, compute), library_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        // NCCL's multicast adds in an order of its own, and some machines forbid it. Nothing here needs it.
        setenv("NCCL_NVLS_ENABLE", "0", 0);
        UniqueId id{};
        if (rank == 0) call<int(UniqueId*)>("ncclGetUniqueId", &id);
        id = s.processes->all_gather(id)[0];
        call<int(void**, int, UniqueId, int)>("ncclCommInitRank", &communicator_, int(count), id, int(rank));
    }
    // Abort does not wait for ranks that have failed; at an orderly end there is nothing left to wait for.
    ~Nccl() override {
        if (communicator_) find<int(void*)>("ncclCommAbort")(communicator_);
    }

    // A group: NCCL starts all sends and receives together, so that their order cannot make ranks wait in a
    // circle.
    void send(const std::vector<Transfer>& transfers) override {
        call<int()>("ncclGroupStart");
        for (const Transfer& t : transfers) {
            if (t.from == t.to || t.bytes == 0) continue;
            if (t.from == rank)
                call<Move<const void*>>("ncclSend", t.send, t.bytes, BYTE, t.to, communicator_, stream());
            if (t.to == rank)
                call<Move<void*>>("ncclRecv", t.receive, t.bytes, BYTE, t.from, communicator_, stream());
        }
        call<int()>("ncclGroupEnd");
    }

private:
    void* const library_;  // null if there is none
    void* communicator_ = nullptr;

    template <class F> F* find(const char* name) const {
        void* const function = library_ ? dlsym(library_, name) : nullptr;
        if (function) return reinterpret_cast<F*>(function);
        throw Error("NCCL with ", name,
                    " was not found, and GPUs that do not reach each other's memory need ",
                    "it: install libnccl2, or name the file in COAT_NCCL.");
    }
    // Calls the function of this name and of type F.
    template <class F, class... A> void call(const char* name, A... arguments) const {
        const int result = find<F>(name)(arguments...);
        if (result == SUCCESS || result == IN_PROGRESS) return;
        throw Error(name, " failed (", find<const char*(int)>("ncclGetErrorString")(result),
                    "); NCCL_DEBUG=WARN in the environment makes it say more.");
    }
};

}  // namespace

std::unique_ptr<Peers> connect_by_nccl(const Setup& s, cudaStream_t compute, const std::string& library) {
    return std::make_unique<Nccl>(s, compute, library);
}

}  // namespace coat::gpu
