// gpu/sharding.cpp - what travels between the GPUs of a run (gpu/sharding.h): through copy engines or
// NCCL, and when.
#include "sharding.h"

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>

namespace coat::gpu {
namespace {

// What a rank tells the others, so that they can map its memory.
struct Address {
    char machine[40];
    int device;
    void* memory;
    cudaIpcMemHandle_t handle;
};

// An allocation at every rank, mapped into this process.
class MappedMemory {
public:
    MappedMemory(const Setup& s, uint8_t* mine)
        : rank_(s.rank), processes_(*s.communicator), mine_(mine), others_(size_t(s.ranks)) {}
    // Memory must not be freed while another process has it open (the manual of cudaIpcOpenMemHandle): all
    // ranks have closed it before one goes on. After an error no rank goes on.
    ~MappedMemory() {
        for (void* memory : others_)
            if (memory && !processes_.ranks_are_threads) cudaIpcCloseMemHandle(memory);
        cudaGetLastError();
        if (!std::uncaught_exceptions()) processes_.all_gather(0);
    }
    MappedMemory(const MappedMemory&) = delete;

    // Whether every rank reaches the memory of every other: all ranks get the same answer.
    bool map() {
        Address mine{.machine = {}, .device = 0, .memory = mine_, .handle = {}};
        std::ifstream("/proc/sys/kernel/random/boot_id").read(mine.machine, sizeof mine.machine - 1);
        check(cudaGetDevice(&mine.device), "Asking for the GPU failed");
        bool mapped = mine.machine[0] && cudaIpcGetMemHandle(&mine.handle, mine_) == cudaSuccess;
        const std::vector<Address> all = processes_.all_gather(mine);
        for (size_t r = 0; r < all.size() && mapped; r++) {
            if (int64_t(r) == rank_) continue;
            mapped = std::strcmp(all[r].machine, mine.machine) == 0 && map(all[r], others_[r]);
        }
        cudaGetLastError();
        for (int theirs : processes_.all_gather(int(mapped))) mapped = mapped && theirs;
        return mapped;
    }
    // The place at another rank that corresponds to this address at this rank.
    template <class T> T* address_at(int64_t rank, T* here) const {
        const ptrdiff_t offset = reinterpret_cast<uint8_t*>(here) - mine_;
        return reinterpret_cast<T*>(static_cast<uint8_t*>(others_[size_t(rank)]) + offset);
    }

private:
    const int64_t rank_;
    Communicator& processes_;
    uint8_t* const mine_;
    std::vector<void*> others_;  // by rank; null if it is not mapped

    // Ranks that are threads of one process share its addresses. The memory of another process is mapped by
    // CUDA.
    bool map(const Address& theirs, void*& other) const {
        if (!processes_.ranks_are_threads)
            return cudaIpcOpenMemHandle(&other, theirs.handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
        other = theirs.memory;
        const cudaError_t error = cudaDeviceEnablePeerAccess(theirs.device, 0);
        return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
    }
};

// GPUs of one machine write into each other's memory with their copy engines. Two flags for each pair order
// the copies, without the host:
//   ready    "my places for exchange n are free"       the receiver sets it at the sender
//   arrived  "what I send in exchange n is there"      the sender sets it at the receiver
// Streams set flags and wait for them by themselves (the driver's stream memory operations).
class CopyEngines : public Transport {
public:
    explicit CopyEngines(const Setup& s) : setup_(s) {}
    ~CopyEngines() override {
        if (!memory_ || std::uncaught_exceptions()) return;
        // Copies may be in flight that wait for another rank.
        setup_.communicator->wait_until([&] { return cudaStreamQuery(comm_stream_) != cudaErrorNotReady; });
        cudaDeviceSynchronize();
    }

    void attach(uint8_t* begin, uint32_t* flags, cudaStream_t stream) override {
        comm_stream_ = stream;
        ready_ = flags;
        arrived_ = flags + setup_.ranks;
        check(cudaMemset(flags, 0, size_t(2 * setup_.ranks) * sizeof(uint32_t)), "Clearing memory failed");
        check(cudaDeviceSynchronize(), "Clearing memory failed");
        memory_ = std::make_unique<MappedMemory>(setup_, begin);
        if (!memory_->map())
            throw Error("The GPUs do not reach each other's memory any more; set COAT_NCCL=libnccl.so.2.");
    }

    // First tells every sender that the places here are free. Then, for one receiver after the other: waits
    // until its places are free, copies, and tells it that everything has arrived. At last waits until what
    // the others send has arrived.
    void send(const std::vector<Transfer>& transfers, cudaStream_t) override {
        exchange_number_++;
        const int64_t me = setup_.rank, count = setup_.ranks;
        auto other = [&](int64_t i) { return (me + i) % count; };  // each rank begins with another one
        for (int64_t i = 1; i < count; i++) flag(write_, memory_->address_at(other(i), ready_ + me), 0);
        for (int64_t i = 1; i < count; i++) {
            const int64_t to = other(i);
            flag(wait_, ready_ + to, AT_LEAST);
            for (const Transfer& t : transfers)
                if (t.with == to && t.send_bytes)
                    copy_async(memory_->address_at(to, t.there), t.send, t.send_bytes, comm_stream_);
            flag(write_, memory_->address_at(to, arrived_ + me), 0);
        }
        for (int64_t i = 1; i < count; i++) flag(wait_, arrived_ + other(i), AT_LEAST | flush_);
    }

private:
    const Setup setup_;
    cudaStream_t comm_stream_ = nullptr;
    uint32_t *ready_ = nullptr, *arrived_ = nullptr;  // flags, by the rank that sets them
    std::unique_ptr<MappedMemory> memory_;
    uint32_t exchange_number_ = 0;  // of the last send(); flags only grow
    // What another GPU has written before it sets a flag must be visible after the wait for this flag. GPUs
    // that may reorder such writes have an option for the wait, flush_, which forbids it.
    static constexpr unsigned AT_LEAST = CU_STREAM_WAIT_VALUE_GEQ;
    const unsigned flush_ =
        device_attribute(cudaDevAttrCanFlushRemoteWrites) ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
    // write_ sets a flag; wait_ waits until a flag is at least the value.
    using StreamFlag = decltype(cuStreamWriteValue32);
    StreamFlag* const write_ =
        library_function<StreamFlag>(DRIVER, "cuStreamWriteValue32_v2", CURE_OLD_DRIVER);
    StreamFlag* const wait_ = library_function<StreamFlag>(DRIVER, "cuStreamWaitValue32_v2", CURE_OLD_DRIVER);

    void flag(StreamFlag* operation, uint32_t* address, unsigned options) const {
        if (operation(comm_stream_, reinterpret_cast<CUdeviceptr>(address), exchange_number_, options) !=
            CUDA_SUCCESS)
            throw Error("The GPUs cannot signal each other; set COAT_NCCL=libnccl.so.2 to use NCCL instead.");
    }
};

// GPUs send through NCCL. It is loaded at run time, so that a program that does not use it does not need it.
class Nccl : public Transport {
public:
    Nccl(const Setup& s, const std::string& library)
        : setup_(s), library_(library), send_(function<Move<const void*>>("ncclSend")),
          receive_(function<Move<void*>>("ncclRecv")) {
        // NCCL's multicast adds in an order of its own, and some machines forbid it. Nothing here needs it.
        setenv("NCCL_NVLS_ENABLE", "0", 0);
        UniqueId id{};
        if (s.rank == 0) succeed(function<int(UniqueId*)>("ncclGetUniqueId")(&id), "ncclGetUniqueId");
        id = s.communicator->all_gather(id)[0];
        const auto init = function<int(void**, int, UniqueId, int)>("ncclCommInitRank");
        succeed(init(&communicator_, int(s.ranks), id, int(s.rank)), "ncclCommInitRank");
    }
    // Abort does not wait for ranks that have failed; at an orderly end there is nothing left to wait for.
    ~Nccl() override { function<int(void*)>("ncclCommAbort")(communicator_); }

    void attach(uint8_t*, uint32_t*, cudaStream_t) override {}

    // The sends and receives are a group of NCCL's: it starts them together, so that their order cannot make
    // ranks wait in a circle.
    void send(const std::vector<Transfer>& transfers, cudaStream_t stream) override {
        succeed(start_(), "ncclGroupStart");
        for (const Transfer& t : transfers) {
            const int with = int(t.with);
            if (t.send_bytes)
                succeed(send_(t.send, t.send_bytes, BYTE, with, communicator_, stream), "ncclSend");
            if (t.receive_bytes)
                succeed(receive_(t.receive, t.receive_bytes, BYTE, with, communicator_, stream), "ncclRecv");
        }
        succeed(end_(), "ncclGroupEnd");
    }

    // Sends a byte to every other rank. NCCL allocates its buffers for a rank when the first bytes travel to
    // it: so afterwards it has all its memory.
    void allocate_buffers() {
        const Stream stream(false);
        UniqueHandle<void*, cudaFree> bytes;
        check(cudaMalloc(&bytes.handle, size_t(setup_.ranks)), "Allocating memory failed");
        uint8_t* const mine = static_cast<uint8_t*>(bytes.handle);
        std::vector<Transfer> transfers;
        for (int64_t other = 0; other < setup_.ranks; other++)
            if (other != setup_.rank)
                transfers.push_back({.with = other,
                                     .send = mine + setup_.rank,
                                     .there = nullptr,
                                     .send_bytes = 1,
                                     .receive = mine + other,
                                     .receive_bytes = 1});
        send(transfers, stream);
        setup_.communicator->wait_until([&] { return cudaStreamQuery(stream) != cudaErrorNotReady; });
        check(cudaStreamSynchronize(stream), "NCCL cannot send");
    }

private:
    // The part of NCCL's interface that is used here, as its documentation gives it. It has been the same
    // since version 2.7.
    struct UniqueId {
        char bytes[128];
    };
    template <class Data>
    using Move = int(Data, size_t, int type, int peer, void* communicator, cudaStream_t);
    static constexpr int SUCCESS = 0, IN_PROGRESS = 7, BYTE = 1;  // ncclSuccess, ncclInProgress, ncclUint8
    const Setup setup_;
    const std::string library_;
    void* communicator_ = nullptr;
    Move<const void*>* const send_;
    Move<void*>* const receive_;
    int (*const start_)() = function<int()>("ncclGroupStart");
    int (*const end_)() = function<int()>("ncclGroupEnd");

    template <class F> F* function(const char* name) const {
        return library_function<F>(library_, name,
                                   "GPUs that do not reach each other's memory need NCCL: install libnccl2, "
                                   "or name the file in COAT_NCCL");
    }
    void succeed(int result, const char* name) const {
        if (result == SUCCESS || result == IN_PROGRESS) return;
        throw Error(name, " failed (", function<const char*(int)>("ncclGetErrorString")(result),
                    "); NCCL_DEBUG=WARN in the environment makes it say more.");
    }
};

// A run on one GPU, in which nothing travels: weights and gradients are those of Parameters.
class Unsharded : public Sharding {
public:
    using Sharding::Sharding;

    void gather_weights(int64_t, Direction) override {}
    TensorRef weight(size_t i) const override { return parameters_.whole_weight(i); }
    void forget_gathered_weights() override {}
    void combine_amaxes_of_ranks() override {}

    TensorRef gradient_to_write(size_t i) const override { return parameters_.whole_gradient(i); }
    void wait_for_gradient_buffer(int64_t) override {}
    void reduce_gradients(int64_t, bool) override {}
    bool sends_gradients() const override { return false; }
    void wait_for_transfers() override {}

    void all_gather(void*, int64_t) override {}
    QuantStats sum_weight_quant_stats(const QuantStats& mine) const override { return mine; }
};

// A run on several GPUs. Transfers are put on a stream of their own.
class Zero3Sharding : public Sharding {
public:
    Zero3Sharding(const GpuContext& context, const MemoryMap& memory, Parameters& parameters,
                  const AmaxTable& amax_table, std::shared_ptr<Transport> transport)
        : Sharding(parameters), setup_(context.setup), context_(context), memory_(memory),
          amax_table_(amax_table), compute_stream_(context.stream), comm_stream_(transport == nullptr),
          transport_(std::move(transport)), matrices_(size_t(head_module()) + 1),
          gathered_(parameters.params.size()) {
        list_matrices();
        if (transport_) transport_->attach(context.arena.begin(), memory.received.flags, comm_stream_);
    }

    // --- Weights
    void gather_weights(int64_t module, Direction direction) override {
        gather(module);
        is_gathered_[module % 2].make_wait(compute_stream_);
        // In backward the first linear layer is the last module: the embeddings are not read again.
        const int64_t next = direction == Direction::Forward ? module + 1 : module - 1;
        if (next > EMBEDDING_MODULE && next <= head_module()) gather(next);
    }
    TensorRef weight(size_t i) const override {
        return parameters_.params[i].is_vector() ? parameters_.whole_weight(i) : gathered_[i];
    }
    void combine_amaxes_of_ranks() override {
        const int64_t n = amax_table_.delayed() ? amax_table_.count() : amax_table_.param_count;
        const int64_t bytes = n * int64_t(sizeof(AmaxAndScale));
        AmaxAndScale* const all = memory_.received.amaxes;
        copy_async(all + setup_.rank * n, amax_table_.all(), bytes, compute_stream_);
        all_gather(all, bytes);
        combine_amaxes(amax_table_.all(), all, n, setup_.ranks, setup_.recipe.w.format, compute_stream_);
    }
    void forget_gathered_weights() override {
        for (int64_t& module : in_buffer_) module = NONE;
    }
    QuantStats sum_weight_quant_stats(const QuantStats& mine) const override {
        if (!sends_codes()) return mine;
        QuantStats sum;
        for (const QuantStats& theirs : setup_.communicator->all_gather(mine)) sum += theirs;
        return sum;
    }

    // --- Gradients
    TensorRef gradient_to_write(size_t i) const override {
        const Param& p = parameters_.params[i];
        return {gradient_from(i, 0), p.rows, p.cols, parameters_.gradient_storage};
    }
    void wait_for_gradient_buffer(int64_t bucket) override {
        is_sent_[buffer_of(bucket)].make_wait(compute_stream_);
    }
    bool sends_gradients() const override { return true; }
    // Each rank gets the gradients of what it owns from all others, and adds them to its sums.
    void reduce_gradients(int64_t bucket, bool first_micro_batch) override {
        const BucketRange& b = parameters_.buckets[bucket];
        const int64_t me = setup_.rank, each = parameters_.gradient_bytes;
        std::vector<Transfer> transfers;
        for (size_t i = b.first; i < b.last; i++)
            for (int64_t other = 0; other < setup_.ranks; other++)
                if (other != me)
                    transfers.push_back({.with = other,
                                         .send = gradient_from(i, owned_by(i, other).first),
                                         .there = received(i, me, other),
                                         .send_bytes = padded_count(owned_by(i, other)) * each,
                                         .receive = received(i, other, me),
                                         .receive_bytes = padded_count(owned_by(i, me)) * each});
        wait_for_compute();
        send(transfers);
        for (size_t i = b.first; i < b.last; i++)
            add_gradients(parameters_.owned_gradient_sum(i), first_micro_batch,
                          {.mine = gradient_from(i, owned_by(i, me).first),
                           .received = received(i, me == 0 ? 1 : 0, me),
                           .format = parameters_.gradient_storage.format,
                           .n = padded_count(owned_by(i, me)),
                           .rank = me,
                           .ranks = setup_.ranks},
                          comm_stream_);
        is_sent_[buffer_of(bucket)].record(comm_stream_);
    }
    void wait_for_transfers() override {
        sent_so_far_.record(comm_stream_);
        sent_so_far_.make_wait(compute_stream_);
    }

    // --- Small values
    void all_gather(void* blocks, int64_t bytes) override {
        std::vector<Transfer> transfers;
        add_gather(
            static_cast<uint8_t*>(blocks),
            [&](int64_t rank) { return Range{.first = rank * bytes, .count = bytes}; }, transfers);
        wait_for_compute();
        send(transfers);
        wait_for_transfers();
    }

private:
    static constexpr int64_t NONE = -1;
    const Setup& setup_;
    const GpuContext& context_;
    const MemoryMap& memory_;
    const AmaxTable& amax_table_;
    const cudaStream_t compute_stream_;
    const Stream comm_stream_;
    const std::shared_ptr<Transport> transport_;  // null in a dry run: nothing travels
    std::vector<std::vector<size_t>> matrices_;   // by module: the parameters that it gathers
    std::vector<TensorRef> gathered_;             // by parameter: a matrix, as it was gathered last
    // Whether weights of linear layers can travel as FP8 codes: if they have one scale per tensor, every rank
    // knows it before it has the whole weight.
    const bool codes_travel_ = linear_formats(setup_).w.fp8() && setup_.recipe.w.granularity == PER_TENSOR;
    Event launched_so_far_, sent_so_far_;
    Event is_sent_[3];      // by buffer of gradients: its gradients are sent, so it may be written again
    Event is_gathered_[2];  // by buffer of weights, of even and of odd modules: the module in it is gathered
    int64_t in_buffer_[2] = {NONE, NONE};  // by buffer of weights: the module in it

    // What is put on the stream from now on runs after what the computation has launched so far.
    void wait_for_compute() {
        launched_so_far_.record(compute_stream_);
        launched_so_far_.make_wait(comm_stream_);
    }
    // Where ranks are threads of one process, their hosts meet before and after they launch transfers. The
    // reason: before CUDA loads a kernel, it waits for all GPUs of the process. Suppose that one of them
    // waits for a transfer which the host of another rank is about to launch. If that host loads a kernel
    // first, both wait for ever.
    void send(const std::vector<Transfer>& transfers) {
        if (!transport_) return;
        if (setup_.communicator->ranks_are_threads) setup_.communicator->all_gather(0);
        transport_->send(transfers, comm_stream_);
        if (setup_.communicator->ranks_are_threads) setup_.communicator->all_gather(0);
    }
    // Rank r has the bytes part(r) of `whole`. Adds the transfers after which every rank has all of them.
    template <class Part> void add_gather(uint8_t* whole, Part part, std::vector<Transfer>& transfers) const {
        const Range mine = part(setup_.rank);
        for (int64_t other = 0; other < setup_.ranks; other++)
            if (other != setup_.rank)
                transfers.push_back({.with = other,
                                     .send = whole + mine.first,
                                     .there = whole + mine.first,
                                     .send_bytes = mine.count,
                                     .receive = whole + part(other).first,
                                     .receive_bytes = part(other).count});
    }

    // --- Gradients
    Range owned_by(size_t i, int64_t rank) const { return owned(parameters_.params[i], rank, setup_.ranks); }
    uint8_t* gradient_from(size_t i, int64_t element) const {
        const Param& p = parameters_.params[i];
        const int64_t in_bucket = p.flat_offset - parameters_.buckets[p.bucket].flat_offset;
        return memory_.gradients_to_write[p.bucket] + (in_bucket + element) * parameters_.gradient_bytes;
    }
    // Where rank `to` receives its part of the gradient of parameter i from rank `from`. The parts lie in the
    // order of the bucket's parameters, and for each parameter in the order of the senders.
    uint8_t* received(size_t i, int64_t from, int64_t to) const {
        int64_t elements = (from - (from > to)) * padded_count(owned_by(i, to));
        for (size_t j = parameters_.buckets[parameters_.params[i].bucket].first; j < i; j++)
            elements += (setup_.ranks - 1) * padded_count(owned_by(j, to));
        return memory_.received.gradients + elements * parameters_.gradient_bytes;
    }
    int buffer_of(int64_t bucket) const {  // as allocate_memory() takes them
        return bucket == 0 && setup_.config.tied ? 2 : int(bucket % 2);
    }

    // --- Weights
    // Whether weights of linear layers travel as codes now: not while a delayed scale is missing.
    bool sends_codes() const { return codes_travel_ && !amax_table_.any_empty_history; }

    void list_matrices() {
        for (size_t i = 0; i < parameters_.params.size(); i++) {
            const Param& p = parameters_.params[i];
            if (p.is_vector()) continue;
            int64_t module = EMBEDDING_MODULE;
            if (p.role.quantized_linear) module = module_of(parameters_.linear_layer_index(i));
            else if (p.name == "head") module = head_module();
            matrices_[size_t(module)].push_back(i);
        }
        if (setup_.config.tied) matrices_.back() = {parameters_.index("embedding")};
    }
    void quantize_slices(const TensorRef& from, const TensorRef& to) const {
        const std::vector<TensorRef> values = slices_for_grids(from), codes = slices_for_grids(to);
        for (size_t i = 0; i < values.size(); i++)
            quantize(lazy_stored(values[i]), {.tensor = codes[i], .delayed = amax_table_.delayed()},
                     context_.quant_stats_of(ReportKind::Weight), comm_stream_);
    }
    // Gathers a module, unless it is in its buffer. Either FP8 codes travel, which each rank makes from its
    // part with the scale of the whole weight; or the weights travel as they are.
    void gather(int64_t module) {
        if (in_buffer_[module % 2] == module) return;
        uint8_t* to = memory_.received.weights[module % 2];
        std::vector<Transfer> transfers;
        wait_for_compute();
        for (size_t i : matrices_[size_t(module)]) {
            const Param& p = parameters_.params[i];
            const bool codes = sends_codes() && p.role.quantized_linear;
            const Storage storage = codes ? setup_.recipe.w : parameters_.weight_storage;
            AmaxAndScale* const scale =
                codes ? amax_table_.of_weight(i, parameters_.linear_layer_index(i)) : nullptr;
            const int64_t each = info(storage.format).bytes;
            auto part = [&](int64_t rank) {
                return Range{.first = owned_by(i, rank).first * each,
                             .count = padded_count(owned_by(i, rank)) * each};
            };
            const Range mine = part(setup_.rank);
            const TensorRef kept = parameters_.owned_weight(i);
            const TensorRef sent{to + mine.first, kept.rows, kept.cols, storage, scale};
            if (codes) quantize_slices(kept, sent);
            else copy_async(sent.data, kept.data, mine.count, comm_stream_);
            add_gather(to, part, transfers);
            gathered_[i] = {to, p.rows, p.cols, storage, scale};
            to += gathered_bytes(setup_, p);
        }
        send(transfers);
        is_gathered_[module % 2].record(comm_stream_);
        in_buffer_[module % 2] = module;
    }
};

}  // namespace

// Whether the copy engines can be used. A small allocation is mapped to find out.
static bool reach_each_other(const Setup& s) {
    UniqueHandle<void*, cudaFree> memory;
    check(cudaMalloc(&memory.handle, GPU_ALIGNMENT), "Allocating memory failed");
    MappedMemory mapped(s, static_cast<uint8_t*>(memory.handle));
    return mapped.map();
}

static int64_t free_memory() {
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "Asking for the GPU's memory failed");
    return int64_t(free);
}

std::shared_ptr<Transport> connect_gpus(const Setup& s) {
    if (s.ranks == 1) return nullptr;
    const char* const set = std::getenv("COAT_NCCL");
    const std::string library = set ? set : "";
    bool chosen = false;  // whether any rank has it: a launcher may have set the variable on one host only
    for (const std::string& theirs : s.communicator->all_gather(library)) chosen = chosen || !theirs.empty();
    if (!chosen && reach_each_other(s)) return std::make_shared<CopyEngines>(s);
    const int64_t before = free_memory();
    auto nccl = std::make_shared<Nccl>(s, library.empty() ? "libnccl.so.2" : library);
    nccl->allocate_buffers();
    if (s.rank == 0)
        std::printf("The GPUs send through NCCL: %s. It takes %s GB of each, which --plan does not count.\n",
                    chosen ? "COAT_NCCL is set" : "they do not reach each other's memory",
                    gigabytes(before - free_memory()).c_str());
    return nccl;
}

std::unique_ptr<Sharding> make_sharding(const GpuContext& context, const MemoryMap& memory,
                                        Parameters& parameters, const AmaxTable& amax_table,
                                        std::shared_ptr<Transport> transport) {
    if (context.setup.ranks == 1) return std::make_unique<Unsharded>(parameters);
    return std::make_unique<Zero3Sharding>(context, memory, parameters, amax_table, std::move(transport));
}

}  // namespace coat::gpu
