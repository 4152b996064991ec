// ranks.cpp - how the processes of a run start, find each other, exchange bytes and end together.
//
// Rank 0 has two TCP connections with every other rank. The first is for the bytes of exchange(). The second
// is for alarms: a thread of each rank listens to it, so a rank that computes or waits learns at once that
// another rank has failed. Only rank 0 prints errors, so the user sees one sentence, not one for each rank.
#include "ranks.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace coat {
namespace {

using std::to_string;

constexpr int MOST_RANKS = 1024, DEFAULT_PORT = 29600;

// The variables in which a launcher says which rank this process is. Several can be set: torchrun can run
// inside of mpirun, and mpirun inside of a Slurm job. The first row that is set is the innermost launcher.
// SLURM_STEP_NUM_TASKS is the number of processes that srun has started. SLURM_NTASKS is also set in the
// shell of sbatch and salloc, where the user starts a single process.
struct Launcher {
    const char *rank, *ranks, *local;
};
constexpr Launcher LAUNCHERS[] = {
    {"COAT_RANK", "COAT_RANKS", "COAT_LOCAL_RANK"},
    {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"},
};

bool is_set(const char* name) {
    const char* text = std::getenv(name);
    return text && *text;
}

// The value of a variable that is set.
int number(const char* name, int least, int most) {
    const char* text = std::getenv(name);
    char* end;
    errno = 0;
    const long value = std::strtol(text, &end, 10);
    if (errno || *end || value < least || value > most)
        throw Error("The environment variable ", name, " is \"", escaped(text),
                    "\"; set it to a whole number from ", least, " to ", most, ", or unset it.");
    return int(value);
}

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Both return false if the connection has ended.
bool send_all(int fd, const void* data, size_t size, int flags = 0) {
    for (auto at = static_cast<const char*>(data); size > 0;) {
        const ssize_t sent = send(fd, at, size, flags | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        at += sent, size -= size_t(sent);
    }
    return true;
}

bool receive_all(int fd, void* data, size_t size) {
    for (auto at = static_cast<char*>(data); size > 0;) {
        const ssize_t received = recv(fd, at, size, 0);
        if (received < 0 && errno == EINTR) continue;
        if (received <= 0) return false;
        at += received, size -= size_t(received);
    }
    return true;
}

void set_option(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof(value));
}

// A host without power or network says nothing. Its alarm connection then ends after 10 + 3 * 5 s.
void set_options(int fd) {
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

void limit_waiting(int fd, int seconds) {  // 0: no limit
    const timeval limit{seconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));  // also of connect()
}

// The first message of each connection, and the answer of rank 0.
enum Channel : uint32_t { DATA, ALARM };
struct Hello {
    uint32_t magic = 0x54414F43, rank = 0, ranks = 0, channel = DATA;
};
enum Answer : uint32_t { WELCOME = 0x4B4F5243, REJECTED = 0x4F4E5243 };

// The messages on an alarm connection. SENTENCE is followed by its length (uint32_t) and its text.
// STOP: end now, without a message. GOODBYE: this rank is done; its connection may end.
enum Alarm : char { GOODBYE = 'G', STOP = 'S', SENTENCE = 'E' };

std::string ended_unexpectedly(int rank) {
    return concat("Rank ", rank, " has ended unexpectedly (killed, or out of memory?); start again with "
                  "--resume from the last checkpoint.");
}

int listen_at(const Launch& launch) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "socket");
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);  // the port of a run that has just ended
    // Other hosts can reach the port only if there can be ranks on them.
    const bool one_host = launch.port == 0 || launch.address == "127.0.0.1" || launch.address == "localhost";
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(uint16_t(launch.port));
    at.sin_addr.s_addr = htonl(one_host ? INADDR_LOOPBACK : INADDR_ANY);
    if (bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    const int why = errno;
    close(fd);
    throw Error("Port ", launch.port, " is in use by another run, or cannot be opened (", std::strerror(why),
                "); choose another with COAT_PORT.");
}

}  // namespace

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The launcher's variables first; then --ranks, which must agree with them or starts the ranks itself.
Launch find_launch(int64_t ranks_flag) {
    Launch launch;
    const auto says = [](const Launcher& each) { return is_set(each.rank) && is_set(each.ranks); };
    const auto* launcher = std::find_if(std::begin(LAUNCHERS), std::end(LAUNCHERS), says);
    if (launcher != std::end(LAUNCHERS)) {
        launch.ranks = number(launcher->ranks, 1, MOST_RANKS);
        launch.rank = number(launcher->rank, 0, launch.ranks - 1);
        const char* local = launcher->local;
        // srun can set PMI_RANK, too, but not the local rank of that row.
        if (!is_set(local) && local == std::string("MPI_LOCALRANKID")) local = "SLURM_LOCALID";
        launch.local = is_set(local) ? number(local, 0, MOST_RANKS - 1) : launch.rank;
    }
    if (ranks_flag > 0 && ranks_flag != launch.ranks) {
        if (launch.ranks > 1)
            throw Error("--ranks ", ranks_flag, " contradicts ", launcher->ranks, "=", launch.ranks,
                        " in the environment; leave out --ranks, or unset ", launcher->ranks, ".");
        // A launcher that has started a single process leaves it to --ranks how many ranks there are.
        return {0, int(ranks_flag), 0, "127.0.0.1", 0};
    }
    if (launch.ranks == 1) return launch;
    launch.address = is_set("MASTER_ADDR") ? std::getenv("MASTER_ADDR") : "127.0.0.1";
    launch.port = is_set("COAT_PORT")     ? number("COAT_PORT", 1, 65535)
                  : is_set("MASTER_PORT") ? number("MASTER_PORT", 1, 65534) + 1  // torchrun holds MASTER_PORT
                                          : DEFAULT_PORT;
    if (launch.local != launch.rank && !is_set("MASTER_ADDR"))
        throw Error("Rank ", launch.rank, " has the local rank ", launch.local,
                    ", so there are several hosts; set MASTER_ADDR to the name of the host of rank 0.");
    return launch;
}

// The connections of one rank. Rank 0 has sockets for every other rank, the others have those for rank 0.
struct ProcessGroup::Connections {
    const Launch launch;
    const int exceptions = std::uncaught_exceptions();
    std::vector<int> data, alarm;  // sockets, by rank; -1: none
    std::vector<pollfd> watched;   // of alarm: those that may still have a message; else -1
    std::vector<pid_t> children;   // by rank, if rank 0 has started them
    int listening = -1;
    std::thread listener;
    bool goodbye = false;              // of rank 0; only for the listener
    std::atomic<bool> failing{false};  // a failure is being reported
    std::atomic<bool> closing{false};  // without a goodbye
    std::atomic<bool> lost{false};     // an alarm connection has ended; read by fail(), not on rank 0

    explicit Connections(const Launch& l)
        : launch(l), data(size_t(l.ranks), -1), alarm(data), watched(data.size(), {-1, POLLIN, 0}) {}

    // If an exception ends this rank (also one of the constructor of ProcessGroup), the others stop.
    ~Connections() {
        const bool orderly = std::uncaught_exceptions() == exceptions;
        if (!orderly) closing = true;
        for (const int fd : alarm) {
            if (fd >= 0) tell(fd, orderly ? GOODBYE : STOP);
            if (fd >= 0 && !orderly) shutdown(fd, SHUT_RDWR);  // wakes the listener
        }
        if (listener.joinable()) listener.join();
        for (const auto* sockets : {&data, &alarm})
            for (const int fd : *sockets)
                if (fd >= 0) close(fd);
        if (listening >= 0) close(listening);
        for (const pid_t child : children) {
            if (child > 0 && !orderly) kill(child, SIGKILL);
            while (child > 0 && waitpid(child, nullptr, 0) < 0 && errno == EINTR) {}
        }
    }

    // ---- start ----

    // Starts this program again for every other rank. As long as such a process has not connected, the kernel
    // ends it together with rank 0.
    void start_others(char** argv) {
        sockaddr_in at{};
        socklen_t size = sizeof(at);
        getsockname(listening, reinterpret_cast<sockaddr*>(&at), &size);
        const int cores = int(std::thread::hardware_concurrency());
        const int threads = std::max(1, cores / launch.ranks);  // of each rank, if the user has not chosen
#ifdef _OPENMP
        if (!is_set("OMP_NUM_THREADS")) omp_set_num_threads(threads);
#endif
        const pid_t parent = getpid();
        children.assign(data.size(), 0);
        for (int rank = 1; rank < launch.ranks; rank++) {
            const pid_t child = children[rank] = fork();
            if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
            if (child > 0) continue;
            for (const auto& [name, value] :
                 {std::pair{"COAT_RANK", rank}, {"COAT_LOCAL_RANK", rank}, {"COAT_RANKS", launch.ranks},
                  {"COAT_PORT", int(ntohs(at.sin_port))}, {"COAT_STARTED", 1}})
                setenv(name, to_string(value).c_str(), 1);
            setenv("MASTER_ADDR", "127.0.0.1", 1);
            setenv("OMP_NUM_THREADS", to_string(threads).c_str(), 0);
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() == parent) execv("/proc/self/exe", argv);
            _exit(127);
        }
    }

    // Rank 0 waits for all others, which connect in any order.
    void accept_all(char** argv, double seconds) {
        const double deadline = now() + seconds;
        listening = listen_at(launch);
        if (launch.port == 0) start_others(argv);
        for (int missing = 2 * (launch.ranks - 1); missing > 0;) {
            const int fd = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
            if (fd >= 0) missing -= greet(fd);
            hear_alarms(2);
            for (size_t rank = 1; rank < children.size(); rank++)
                if (alarm[rank] < 0) check_child(int(rank));
            if (missing == 0 || now() < deadline) continue;
            std::string list;
            for (int rank = 1; rank < launch.ranks; rank++)
                if (data[rank] < 0) list += concat(list.empty() ? "" : ", ", rank);
            throw Error("Some ranks of ", launch.ranks, " have not connected in time (", list,
                        "); start all, with the same MASTER_ADDR and COAT_PORT (", launch.port, ").");
        }
        close(listening);
        listening = -1;
    }

    // True if a rank has connected. A connection of another program is closed.
    bool greet(int fd) {
        Hello hello;
        limit_waiting(fd, 1);  // another program may say nothing
        const bool ours = receive_all(fd, &hello, sizeof(hello)) && hello.magic == Hello().magic &&
                          hello.channel <= ALARM;
        if (!ours) return close(fd), false;
        limit_waiting(fd, 0);
        auto& sockets = hello.channel == DATA ? data : alarm;
        std::string error;
        if (hello.ranks != data.size() || hello.rank == 0 || hello.rank >= hello.ranks)
            error = concat("Rank ", hello.rank, " of ", hello.ranks, " has connected with rank 0 of ",
                           launch.ranks, "; start each rank once, with the same number of ranks.");
        else if (sockets[hello.rank] >= 0)
            error = concat("Rank ", hello.rank, " has connected twice: two runs use port ", launch.port,
                           "; choose another port for one of them with COAT_PORT.");
        const Answer answer = error.empty() ? WELCOME : REJECTED;
        send_all(fd, &answer, sizeof(answer));
        if (!error.empty()) close(fd), throw Error(error);
        sockets[hello.rank] = fd;
        if (hello.channel == ALARM) watched[hello.rank].fd = fd;
        set_options(fd);
        return true;
    }

    // A process that ends before it has connected has printed its own error, if its exit code is 1.
    void check_child(int rank) {
        pid_t& child = children[rank];
        int status;
        if (child == 0 || waitpid(child, &status, WNOHANG) != child) return;
        child = 0;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 1) end_all("");
        throw Error("Rank ", rank, " has ended before it connected with rank 0 (wait status ", status,
                    "); check the memory of this host and start again.");
    }

    // The alarm connection comes first: from then on this rank learns that another has failed.
    void connect_with_rank_0(double seconds) {
        const double deadline = now() + seconds;
        for (const Channel channel : {ALARM, DATA}) {
            int& fd = (channel == DATA ? data : alarm)[0];
            while ((fd = try_to_connect(channel, deadline)) < 0) {
                if (now() > deadline)
                    throw Error("Rank ", launch.rank, " cannot connect with rank 0 at ", launch.address,
                                ", port ", launch.port,
                                "; start rank 0, and check MASTER_ADDR and COAT_PORT.");
                sleep_ms(20);
            }
            set_options(fd);
            if (channel == ALARM) watched[0].fd = fd, start_listener();
        }
        if (is_set("COAT_STARTED")) prctl(PR_SET_PDEATHSIG, 0);  // from now on the alarm connection does this
    }

    // A socket; -1 if rank 0 does not answer (yet), or another program does.
    int try_to_connect(Channel channel, double deadline) const {
        addrinfo hints{}, *found = nullptr;
        hints.ai_family = AF_INET;
        hints.ai_socktype = SOCK_STREAM;
        if (getaddrinfo(launch.address.c_str(), to_string(launch.port).c_str(), &hints, &found)) return -1;
        const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, freeaddrinfo);
        Hello hello;
        hello.rank = uint32_t(launch.rank), hello.ranks = uint32_t(launch.ranks), hello.channel = channel;
        for (const addrinfo* at = found; at; at = at->ai_next) {
            const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (fd < 0) throw std::system_error(errno, std::generic_category(), "socket");
            limit_waiting(fd, std::max(1, int(deadline - now())));
            Answer answer{};
            if (connect(fd, at->ai_addr, at->ai_addrlen) == 0 && send_all(fd, &hello, sizeof(hello)) &&
                receive_all(fd, &answer, sizeof(answer)) && answer == WELCOME) {
                limit_waiting(fd, 0);
                return fd;
            }
            close(fd);
            if (answer == REJECTED) _exit(1);  // rank 0 says why
        }
        return -1;
    }

    // ---- alarms ----

    static bool tell(int fd, Alarm kind, const std::string& text = "") {
        const auto size = uint32_t(text.size());
        std::string message(1, kind);
        if (kind == SENTENCE) message.append(reinterpret_cast<const char*>(&size), sizeof(size)) += text;
        return send_all(fd, message.data(), message.size());
    }

    void start_listener() {
        sigset_t all, old;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);  // signals are for the main thread
        listener = std::thread([this] {
            auto open = [](const pollfd& each) { return each.fd >= 0; };
            while (std::any_of(watched.begin(), watched.end(), open)) hear_alarms(-1);
        });
        pthread_sigmask(SIG_SETMASK, &old, nullptr);
    }

    // Waits for messages on the alarm connections, at most so long (-1: until there is one).
    void hear_alarms(int milliseconds) {
        if (poll(watched.data(), watched.size(), milliseconds) <= 0) return;
        for (size_t rank = 0; rank < watched.size(); rank++)
            if (watched[rank].revents) hear(int(rank));
    }

    // One message from the alarm connection with a rank, or its end. After its goodbye, rank 0 closes the
    // connections as soon as it has heard the goodbyes of all; the others wait for that.
    void hear(int rank) {
        char kind = 0;
        const bool open = receive_all(alarm[rank], &kind, 1);
        if (closing || (!open && goodbye)) lost = true, watched[rank].fd = -1;
        else if (kind == GOODBYE && launch.rank == 0) watched[rank].fd = -1;
        else if (kind == GOODBYE) goodbye = true;
        else if (launch.rank != 0) rank_0_has_ended(kind == STOP);
        else if (kind == STOP) sleep_ms(300), end_all("");  // that rank prints its error in the meantime
        else if (kind != SENTENCE) end_all(ended_unexpectedly(rank));
        else {
            uint32_t size = 0;
            receive_all(alarm[rank], &size, sizeof(size));
            std::string sentence(size, ' ');
            receive_all(alarm[rank], sentence.data(), size);
            end_all(concat("Rank ", rank, ": ", sentence));
        }
    }

    void rank_0_has_ended(bool with_sentence) {
        if (!with_sentence) {
            lost = true, watched[0].fd = -1;
            if (failing) return;  // fail() prints its sentence
            if (launch.rank == 1) print_error(ended_unexpectedly(0));
        }
        _exit(1);
    }

    // Rank 0 ends the run. The sentence comes first: a launcher may kill all ranks when one has ended.
    [[noreturn]] void end_all(const std::string& sentence) {
        wait_if_failing();
        if (!sentence.empty()) print_error(sentence);
        for (const int fd : alarm)
            if (fd >= 0) tell(fd, STOP);
        for (size_t rank = 0; rank < children.size(); rank++)
            if (children[rank] > 0 && alarm[rank] < 0) kill(children[rank], SIGKILL);
        for (int i = 0; i < 100 && waitpid(-1, nullptr, WNOHANG) >= 0; i++) sleep_ms(10);  // for the children
        _exit(1);
    }

    // Only the first failure of a process is reported. Another thread waits here until the process ends.
    void wait_if_failing() {
        if (failing.exchange(true))
            for (;;) sleep_ms(1000);
    }

    // Other ranks give their sentence to rank 0, which prints it. Without rank 0 they print it themselves.
    [[noreturn]] void fail(const std::string& sentence) {
        if (launch.rank == 0) end_all(sentence);
        wait_if_failing();
        const bool told = tell(alarm[0], SENTENCE, sentence);
        for (int i = 0; i < 500 && told && !lost; i++) sleep_ms(10);  // the listener ends the process at STOP
        if (!told || lost) print_error(sentence);
        _exit(1);
    }

    // ---- exchange ----

    // The sizes, then the bytes.
    void send_frame(int to, const std::vector<Bytes>& parts) {
        std::vector<uint64_t> sizes;
        for (const Bytes& part : parts) sizes.push_back(part.size());
        bool sent = send_all(data[to], sizes.data(), sizes.size() * sizeof(uint64_t), MSG_MORE);
        for (size_t p = 0; p < parts.size() && sent; p++)
            sent = send_all(data[to], parts[p].data(), parts[p].size(), MSG_MORE);
        set_option(data[to], IPPROTO_TCP, TCP_NODELAY, 1);  // sends what MSG_MORE has kept back
        if (!sent) end_of(to);
    }

    std::vector<Bytes> receive_frame(int from) {
        std::vector<uint64_t> sizes(data.size());
        bool received = receive_all(data[from], sizes.data(), sizes.size() * sizeof(uint64_t));
        std::vector<Bytes> parts;
        for (size_t p = 0; p < sizes.size() && received; p++)
            received = receive_all(data[from], parts.emplace_back(sizes[p]).data(), sizes[p]);
        if (!received) end_of(from);
        return parts;
    }

    // The listener ends this process, with the reason. If it does not hear of it, this thread does.
    [[noreturn]] void end_of(int rank) {
        sleep_ms(5000);
        fail(ended_unexpectedly(rank));
    }
};

ProcessGroup::ProcessGroup(const Launch& launch, char** argv, double seconds) : launch_(launch) {
    if (launch.ranks == 1) return;
    connections_ = std::make_unique<Connections>(launch);
    if (launch.rank == 0) connections_->accept_all(argv, seconds), connections_->start_listener();
    else connections_->connect_with_rank_0(seconds);
}

ProcessGroup::~ProcessGroup() = default;

// Rank 0 passes on what the others send. It reads everything first; the others send everything first. So no
// rank waits for another that waits for it, whatever the sizes are.
std::vector<Bytes> ProcessGroup::exchange(std::vector<Bytes> to) {
    const size_t ranks = count(), me = rank();
    if (to.size() != ranks) throw std::logic_error("exchange() needs an entry for each rank");
    if (ranks == 1) return to;
    Bytes own;
    own.swap(to[me]);  // does not travel
    Connections& peers = *connections_;
    std::vector<Bytes> from;
    if (me != 0) {
        peers.send_frame(0, to);
        from = peers.receive_frame(0);
    } else {
        std::vector<std::vector<Bytes>> sent = {std::move(to)};  // by sender, then by receiver
        for (size_t sender = 1; sender < ranks; sender++) sent.push_back(peers.receive_frame(sender));
        for (size_t receiver = ranks; receiver-- > 0;) {
            from.clear();
            for (auto& parts : sent) from.push_back(std::move(parts[receiver]));
            if (receiver > 0) peers.send_frame(receiver, from);
        }
    }
    from[me] = std::move(own);
    return from;
}

void ProcessGroup::fail(const std::string& sentence) {
    if (connections_) connections_->fail(sentence);
    print_error(sentence);
    _exit(1);
}

}  // namespace coat
