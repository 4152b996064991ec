// program/processes.h - the processes of a run: how they start, exchange small values and end together
// (processes.cpp).
//
// A run on several GPUs has one process for each GPU, called a rank. Rank 0 has a socket to each other rank.
// Small values and the tensors of checkpoints go through these sockets. On the CPU gradients and weights go
// through them, too. What GPUs exchange directly is in gpu/.
#pragma once
#include <csignal>
#include <mutex>
#include <sys/types.h>
#include <thread>

#include "../common/ranks.h"

namespace coat {

// The signal that asks this process to end after the current step; main.cpp's handler sets it.
inline volatile std::sig_atomic_t signal_received = 0;

// How this process was started. There are two ways:
//   torchrun   starts the ranks, on one machine or on several. It describes a rank in the variables RANK,
//              WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
//   --ranks    rank 0 starts the other ranks itself
struct Launch {
    int rank = 0, ranks = 1;
    int local_rank = 0;   // the rank's number among those of its machine, which chooses the GPU
    std::string address;  // of rank 0; empty if rank 0 starts the other ranks itself
    int port = 0;         // at which rank 0 listens
};
// Reads the variables of torchrun. Error if one is wrong, or contradicts --ranks. ranks_flag is 0 if --ranks
// is not given.
Launch find_launch(int64_t ranks_flag);

// The ranks of a run that are processes.
class ProcessGroup : public Communicator {
public:
    // Starts or finds the other ranks; Error if they have not connected within `seconds`. Without an address
    // it forks, so it must come before CUDA and before the first parallel loop.
    static std::unique_ptr<ProcessGroup> start(const Launch& launch, double seconds = 60);
    // sockets: one for each rank, or -1. Rank 0 has a socket to each other rank; the others have one socket,
    // to rank 0.
    explicit ProcessGroup(int rank = 0, int local_rank = 0, const std::vector<int>& sockets = {-1});
    ~ProcessGroup() override;  // waits until all ranks have come here
    ProcessGroup(const ProcessGroup&) = delete;

    int rank() const { return rank_; }
    int count() const { return int(peers_.size()); }
    int local_rank() const override { return local_rank_; }

    std::vector<Bytes> gather(const Bytes& mine, bool on_all) override;
    void wait_until(const std::function<bool()>& done) override;
    // In seconds: if a rank has been silent for longer, standard error names it. Tests shorten this time.
    inline static double patience = 60;
    // In seconds: when a rank has ended, another one that is busy and reads no socket ends this much later.
    inline static double grace = 10;

    // Printed after the sentence of an error, if it is not empty: how the run can be continued.
    std::string advice_after_error;

    // If several ranks fail, rank 0's sentence is printed, or the first that reaches it. If the process of a
    // rank ends in any other way, all ranks end, too.
    [[noreturn]] void fail(const std::string& sentence) override;

private:
    struct Peer {
        int socket = -1;
        double heard = 0;  // the time at which anything last came from it
        Bytes message;     // the message that it is sending, with its header
        size_t got = 0;    // the bytes of this message that have come
    };
    const int rank_, local_rank_;
    std::vector<Peer> peers_;      // by rank
    int sending_to_ = -1;          // the rank to which a message is being sent; -1 if there is none
    std::mutex reading_;           // of the peers' messages, which two threads read
    std::vector<pid_t> children_;  // the processes that this rank has started
    std::jthread watch_;           // of ranks that start() has made

    static std::unique_ptr<ProcessGroup> start_others(int ranks);
    void send(int to, const Bytes& message);
    Bytes receive(int from);
    bool has_sent(int rank);
    void drop_message(int rank);
    double heard(int rank);
    void look_at(int rank, const std::function<bool()>& done);
    void start_watch();
    void watch(const std::stop_token& stop);
    [[noreturn]] void end(const std::string& sentence, int code = 1);
};

}  // namespace coat
