// ranks.h - the processes of a run: how they start, exchange small values and end together (ranks.cpp).
//
// A run on several GPUs has one process for each GPU, called a rank. Rank 0 has a socket to each of the
// others. Small values and the tensors of checkpoints go through it; on the CPU everything does. What GPUs
// exchange directly is in gpu/.
#pragma once
#include <csignal>
#include <mutex>
#include <thread>

#include "../model.h"

namespace coat {

double now();  // the time in seconds, for durations and deadlines; its origin means nothing

// The signal that asks this process to end after the current step; train.cpp's handler sets it.
inline volatile std::sig_atomic_t interrupted = 0;

// Which process this is, as the variables that torchrun sets say: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
// MASTER_PORT.
struct Launch {
    int rank = 0, ranks = 1;
    int local = 0;        // the rank on this machine, which chooses the GPU
    std::string address;  // of rank 0; empty: rank 0 starts the other ranks itself
    int port = 0;         // at which rank 0 listens
};
// Error if a variable is wrong, or contradicts --ranks (0: not given).
Launch find_launch(int64_t ranks_flag);

// The ranks as processes.
class ProcessGroup : public Ranks {
public:
    // Starts or finds the other ranks; Error if they have not connected within `seconds`. Without an address
    // it forks, so it must come before CUDA and before the first parallel loop.
    static std::unique_ptr<ProcessGroup> start(const Launch& launch, double seconds = 60);
    // sockets: by rank. -1: there is none; ranks other than 0 have one to rank 0 alone.
    explicit ProcessGroup(int rank = 0, int local = 0, const std::vector<int>& sockets = {-1});
    ~ProcessGroup() override;  // waits until all ranks have come here
    ProcessGroup(const ProcessGroup&) = delete;

    int rank() const { return rank_; }
    int count() const { return static_cast<int>(peers_.size()); }
    int local() const override { return local_; }

    std::vector<Bytes> gather(const Bytes& mine, bool on_all) override;
    // A rank that computes or hangs for long is named.
    void wait_until(const std::function<bool()>& done) override;
    inline static double patience = 60;  // in seconds, until a rank is named
    // In seconds: how much later than a rank one ends that waits elsewhere and looks at no socket.
    inline static double grace = 10;

    // The last complete checkpoint, or empty. It is named after the sentence of any error.
    std::string checkpoint;

    // Where all ranks fail, the sentence is rank 0's. If the process of a rank ends in any other way, all end
    // too.
    [[noreturn]] void fail(const std::string& sentence) override;

private:
    struct Peer {
        int socket = -1;
        double heard = 0;  // when it last sent anything
        Bytes message;     // the next message that it sends, with its header
        size_t got = 0;    // the bytes of that message that have come
    };
    const int rank_, local_;
    std::vector<Peer> peers_;  // by rank
    int sending_to_ = -1;      // the rank to which a part of a message has been sent; -1: none
    std::mutex reading_;       // of has_sent(), which two threads call
    std::jthread watch_;       // of ranks that start() has made

    void send(int to, const Bytes& message);
    Bytes receive(int from);
    bool has_sent(int rank);
    void start_watch();
    void watch(const std::stop_token& stop);
    [[noreturn]] void end(const std::string& sentence, int code = 1);
};

}  // namespace coat
