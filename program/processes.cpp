// program/processes.cpp - how the processes of a run start, find each other, exchange values and end together
// (processes.h).
//
// While a rank waits, it checks that the ranks to which it has a socket still live. Rank 0 prints the errors
// of all ranks. If rank 0 itself is gone, rank 1 says so.
//
// In this order: messages; how the ranks are started with --ranks; how they find each other under torchrun;
// and ProcessGroup, which exchanges values and ends.
#include "processes.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <omp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"

namespace coat {

constexpr int MOST_RANKS = 1024;
// The bytes of the longest value that a rank may send: no tensor of known_models() has more.
constexpr uint64_t MOST_BYTES = uint64_t{1} << 33;

// -----------------------------------------------------------------------------------------------------------
// Messages

namespace {

// A message is a header and as many bytes as the header says. DATA brings a value, or the values of all
// ranks. WAITING says that the sender lives, and is waiting itself. ENDING says that all ranks end; if it
// comes from a rank that has failed, its bytes are the sentence that rank 0 prints.
enum MessageKind : uint8_t { DATA = 'D', WAITING = 'W', ENDING = 'E' };
struct __attribute__((packed)) Header {
    uint8_t kind = 0;
    uint64_t size = 0;  // of what follows, in bytes
};

}  // namespace

static Bytes message_of(MessageKind kind, const void* data, size_t size) {
    const Header header{kind, size};
    Bytes message(sizeof header + size);
    std::memcpy(message.data(), &header, sizeof header);
    if (size) std::memcpy(&message[sizeof header], data, size);
    return message;
}

// The values of all ranks as rank 0 sends them to the others: the size of each, then the bytes of each.
static Bytes join(const std::vector<Bytes>& values) {
    std::vector<uint64_t> sizes;
    uint64_t all_bytes = values.size() * sizeof(uint64_t);
    for (const Bytes& value : values) {
        sizes.push_back(value.size());
        all_bytes += value.size();
    }
    Bytes joined;
    joined.reserve(all_bytes);
    const auto* begin = reinterpret_cast<const uint8_t*>(sizes.data());
    joined.insert(joined.end(), begin, begin + sizes.size() * sizeof(uint64_t));
    for (const Bytes& value : values) joined.insert(joined.end(), value.begin(), value.end());
    return joined;
}

// The inverse of join(). Returns no values if the bytes are not what join() makes of `count` values.
static std::vector<Bytes> split(const Bytes& joined, size_t count) {
    std::vector<uint64_t> sizes(count);
    const size_t header = count * sizeof(uint64_t);
    if (joined.size() < header) return {};
    std::memcpy(sizes.data(), joined.data(), header);
    std::vector<Bytes> values;
    size_t at = header;
    for (const uint64_t size : sizes) {
        if (size > joined.size() - at) return {};
        values.emplace_back(joined.begin() + int64_t(at), joined.begin() + int64_t(at + size));
        at += size;
    }
    return values;
}

// Sends a message without bytes, if there is room for it at once.
static void tell(int socket, MessageKind kind) {
    const Header message{.kind = kind};
    ::send(socket, &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// -----------------------------------------------------------------------------------------------------------
// --ranks: rank 0 starts the others

// Starts the other ranks of --ranks, each with a socket that no other program can reach.
std::unique_ptr<ProcessGroup> ProcessGroup::start_others(int ranks) {
    if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(std::max(1, omp_get_num_procs() / ranks));
    std::fflush(nullptr);
    std::vector<int> sockets = {-1};
    std::vector<pid_t> children;
    const auto rank_0 = [&] {
        auto processes = std::make_unique<ProcessGroup>(0, 0, sockets);
        processes->children_ = children;
        return processes;
    };
    for (int rank = 1; rank < ranks; rank++) {
        int ends[2];
        const bool connected = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
        const pid_t child = connected ? ::fork() : -1;
        if (child < 0) rank_0()->fail(concat("A process cannot start (", std::strerror(errno), ")."));
        if (child == 0) {
            for (const int fd : sockets) ::close(fd);
            ::close(ends[0]);
            sockets.assign(ranks, -1);
            sockets[0] = ends[1];
            return std::make_unique<ProcessGroup>(rank, rank, sockets);
        }
        ::close(ends[1]);
        children.push_back(child);
        sockets.push_back(ends[0]);
    }
    return rank_0();
}

// -----------------------------------------------------------------------------------------------------------
// torchrun: the ranks run already, and find rank 0

// What a rank says when it connects: a text of HELLO bytes, padded with zeros.
constexpr size_t HELLO = 96, LONGEST_TOKEN = 64;
static std::string hello(int ranks, int rank) {
    std::string text = concat("COAT rank ", rank, " of ", ranks, ", ", std::getenv("COAT_TOKEN"));
    text.resize(HELLO);
    return text;
}

// Opens a socket at one address of rank 0, within `seconds`. On rank 0 it listens there, on other ranks it is
// connected. Returns -1 if that is not possible.
static int open_socket_at(const addrinfo& at, bool listens, double seconds) {
    const int socket = ::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    const timeval limit{.tv_sec = time_t(std::max(1.0, seconds)), .tv_usec = 0};
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // the port of a run that has just ended
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (const int option : {SO_SNDTIMEO, SO_RCVTIMEO})  // the first is that of connect(), too
        ::setsockopt(socket, SOL_SOCKET, option, &limit, sizeof limit);
    bool ok = false;
    if (listens) ok = ::bind(socket, at.ai_addr, at.ai_addrlen) == 0 && ::listen(socket, SOMAXCONN) == 0;
    else ok = ::connect(socket, at.ai_addr, at.ai_addrlen) == 0;
    if (ok) return socket;
    ::close(socket);
    return -1;
}

// As open_socket_at(), at the first usable address that the name of rank 0's machine has.
static int open_socket(const Launch& launch, double seconds) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const std::string port = std::to_string(launch.port);
    if (::getaddrinfo(launch.address.c_str(), port.c_str(), &hints, &found) != 0) errno = EADDRNOTAVAIL;
    int socket = -1;
    for (const addrinfo* at = found; at && socket < 0; at = at->ai_next)
        socket = open_socket_at(*at, launch.rank == 0, seconds);
    if (found) ::freeaddrinfo(found);
    return socket;
}

// Rank 0 waits for the others, which connect in any order. A program that connects and is no rank of this run
// is sent away; one that says nothing, after a second. Returns the sockets by rank, with -1 for a rank that
// has not connected before the deadline.
static std::vector<int> accept_others(int listening, int ranks, double deadline) {
    const timeval second{.tv_sec = 1, .tv_usec = 0};
    std::vector<int> sockets(ranks, -1);
    pollfd listener{.fd = listening, .events = POLLIN, .revents = 0};
    while (std::count(sockets.begin() + 1, sockets.end(), -1) > 0 && now() < deadline) {
        if (::poll(&listener, 1, 10) <= 0) continue;
        const int caller = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
        ::setsockopt(caller, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
        std::string said(HELLO, '\0');
        ::recv(caller, said.data(), HELLO, MSG_WAITALL);
        int rank = 1;
        while (rank < ranks && (sockets[rank] >= 0 || said != hello(ranks, rank))) rank++;
        if (rank == ranks) {
            ::close(caller);
            continue;
        }
        tell(caller, WAITING);
        sockets[rank] = caller;
    }
    ::close(listening);
    return sockets;
}

// Waits until rank 0, which may start later, has accepted this rank, and returns the socket; -1 if that has
// not happened before the deadline.
static int connect_to_rank_0(const Launch& launch, double deadline) {
    int socket = open_socket(launch, deadline - now());
    while (socket < 0 && now() < deadline) {
        ::usleep(20'000);
        socket = open_socket(launch, deadline - now());
    }
    Header answer;
    ::send(socket, hello(launch.ranks, launch.rank).data(), HELLO, MSG_NOSIGNAL);
    const bool accepted = ::recv(socket, &answer, sizeof answer, MSG_WAITALL) == sizeof answer;
    if (accepted) return socket;
    if (socket >= 0) ::close(socket);
    return -1;
}

// The text of a variable of the environment.
static std::string variable(const char* name) {
    const char* const text = std::getenv(name);
    if (text && *text) return text;
    throw Error(name, " is not set; all ranks need one MASTER_ADDR, MASTER_PORT and COAT_TOKEN, a secret.");
}
static int integer_variable(const char* name, int least, int most) {
    const std::string text = variable(name);
    char* end = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (*end || value < least || value > most)
        throw Error(name, " is \"", text, "\"; set it to a number from ", least, " to ", most, ".");
    return int(value);
}

Launch find_launch(int64_t ranks_flag) {
    constexpr int MOST_PORT = 65535;
    const bool launched = std::getenv("RANK") && std::getenv("WORLD_SIZE");
    const int ranks = launched ? integer_variable("WORLD_SIZE", 1, MOST_RANKS) : 1;
    if (ranks_flag > MOST_RANKS || (ranks > 1 && ranks_flag > 0 && ranks_flag != ranks))
        throw Error("--ranks ", ranks_flag, " is more than ", MOST_RANKS, ", or differs from WORLD_SIZE.");
    Launch launch;
    if (ranks == 1) {
        launch.ranks = int(std::max<int64_t>(1, ranks_flag));
        return launch;
    }
    launch.ranks = ranks;
    launch.rank = integer_variable("RANK", 0, ranks - 1);
    launch.address = variable("MASTER_ADDR");
    launch.local_rank = launch.rank;
    if (std::getenv("LOCAL_RANK")) launch.local_rank = integer_variable("LOCAL_RANK", 0, MOST_RANKS - 1);
    // torchrun itself listens at MASTER_PORT.
    if (std::getenv("COAT_PORT")) launch.port = integer_variable("COAT_PORT", 1, MOST_PORT);
    else launch.port = integer_variable("MASTER_PORT", 1, MOST_PORT - 1) + 1;
    if (variable("COAT_TOKEN").size() > LONGEST_TOKEN)
        throw Error("COAT_TOKEN is longer than ", LONGEST_TOKEN, " characters; choose a shorter secret.");
    return launch;
}

// Connects with the other ranks, which torchrun has started; Error if that takes more than `seconds`.
static std::unique_ptr<ProcessGroup> connect_with_others(const Launch& launch, double seconds) {
    const std::string where = concat(launch.address, ", port ", launch.port);
    const double deadline = now() + seconds;
    std::vector<int> sockets(launch.ranks, -1);
    if (launch.rank == 0) {
        const int listening = open_socket(launch, seconds);
        if (listening < 0)
            throw Error("Rank 0 cannot listen at ", where, " (", std::strerror(errno),
                        "); set MASTER_ADDR to an address of its machine, COAT_PORT to a free port.");
        sockets = accept_others(listening, launch.ranks, deadline);
    } else {
        sockets[0] = connect_to_rank_0(launch, deadline);
    }
    auto processes = std::make_unique<ProcessGroup>(launch.rank, launch.local_rank, sockets);
    const int expected = launch.rank == 0 ? launch.ranks : 1;  // the ranks to which this one has a socket
    for (int rank = 0; rank < expected; rank++) {
        if (rank == launch.rank || sockets[rank] >= 0) continue;
        const std::string sentence =
            concat("Rank ", std::max(rank, launch.rank), " has not connected with rank 0 at ", where,
                   "; start both, with the same WORLD_SIZE, MASTER_ADDR, COAT_PORT and COAT_TOKEN.");
        if (launch.rank > 0) throw Error(sentence);
        processes->fail(sentence);
    }
    return processes;
}

std::unique_ptr<ProcessGroup> ProcessGroup::start(const Launch& launch, double seconds) {
    const bool starts_others = launch.address.empty();
    auto processes = starts_others ? start_others(launch.ranks) : connect_with_others(launch, seconds);
    processes->start_watch();
    return processes;
}

ProcessGroup::ProcessGroup(int rank, int local_rank, const std::vector<int>& sockets)
    : rank_(rank), local_rank_(local_rank), peers_(sockets.size()) {
    for (size_t rank = 0; rank < sockets.size(); rank++) peers_[rank].socket = sockets[rank];
}

ProcessGroup::~ProcessGroup() {
    const bool on_all = true;
    if (!std::uncaught_exceptions()) gather({}, on_all);
    watch_ = {};
    for (const Peer& peer : peers_) ::close(peer.socket);
    for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
}

// Rank 0 reads from all others before it sends to any, and the others send before they read: so no two ranks
// wait for each other. A rank other than 0 sends one message and gets one, however many ranks there are.
std::vector<Bytes> ProcessGroup::gather(const Bytes& mine, bool on_all) {
    std::vector<Bytes> values(peers_.size());
    values[rank_] = mine;
    if (rank_ > 0) {
        send(0, message_of(DATA, mine.data(), mine.size()));
        if (!on_all) return values;
        values = split(receive(0), peers_.size());
        if (values.empty())
            end("Rank 0 has sent something else than values; start the same program on all ranks.");
        return values;
    }
    for (int from = 1; from < count(); from++) values[from] = receive(from);
    if (!on_all || count() == 1) return values;
    const Bytes joined = join(values);
    const Bytes message = message_of(DATA, joined.data(), joined.size());
    for (int to = 1; to < count(); to++) send(to, message);
    return values;
}

void ProcessGroup::send(int to, const Bytes& message) {
    size_t sent = 0;
    pollfd socket{.fd = peers_[to].socket, .events = POLLOUT, .revents = 0};
    sending_to_ = to;
    wait_until([&] {
        if (::poll(&socket, 1, 20) <= 0) return false;
        const size_t rest = message.size() - sent;
        const ssize_t taken = ::send(socket.fd, &message[sent], rest, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (taken > 0) sent += taken;
        return sent == message.size();
    });
    sending_to_ = -1;
}

Bytes ProcessGroup::receive(int from) {
    Peer& peer = peers_[from];
    pollfd socket{.fd = peer.socket, .events = POLLIN, .revents = 0};
    wait_until([&] { return has_sent(from) || (::poll(&socket, 1, 20) > 0 && has_sent(from)); });
    const std::lock_guard reading(reading_);
    const Bytes value(peer.message.begin() + sizeof(Header), peer.message.end());
    peer.message.clear();
    peer.message.shrink_to_fit();  // it may have been a large tensor
    peer.got = 0;
    return value;
}

// Forgets the message that has come from a rank. The next bytes from it begin another message.
void ProcessGroup::drop_message(int rank) {
    const std::lock_guard reading(reading_);
    peers_[rank].got = 0;
}
// The time at which anything last came from a rank.
double ProcessGroup::heard(int rank) {
    const std::lock_guard reading(reading_);
    return peers_[rank].heard;
}

// Reads the bytes that have come from a rank, without waiting. Returns whether they are a whole value. If the
// rank has failed or ended, or has sent what no rank sends, this process ends, too.
bool ProcessGroup::has_sent(int rank) {
    const std::lock_guard reading(reading_);
    Peer& peer = peers_[rank];
    for (;;) {
        Header header;  // until it has come, the message counts as a header without further bytes
        if (peer.got >= sizeof header) std::memcpy(&header, peer.message.data(), sizeof header);
        if (header.size > MOST_BYTES * peers_.size()) break;
        peer.message.resize(sizeof header + header.size);
        if (const size_t missing = peer.message.size() - peer.got) {
            const ssize_t n = ::recv(peer.socket, &peer.message[peer.got], missing, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN) return false;
            if (n <= 0) break;
            peer.got += n;
            peer.heard = now();
            continue;
        }
        if (header.kind == DATA) return true;
        const std::string sentence(peer.message.begin() + sizeof header, peer.message.end());
        if (header.kind == ENDING) end(sentence.empty() ? "" : concat("Rank ", rank, ": ", sentence));
        peer.got = 0;  // it was WAITING, and the next message begins
    }
    end(rank_ > 1 ? "" : concat("Rank ", rank, " has ended unexpectedly (killed?); start again."));
}

// Ends this process if the rank has ended, unless done() is true: a rank may end once it has sent the value
// that this one waits for. The last message of a rank may say why it ends, so the values before it are
// dropped.
void ProcessGroup::look_at(int rank, const std::function<bool()>& done) {
    pollfd closed{.fd = peers_[rank].socket, .events = POLLRDHUP, .revents = 0};
    while (has_sent(rank) && ::poll(&closed, 1, 0) > 0 && !done()) drop_message(rank);
}

void ProcessGroup::wait_until(const std::function<bool()>& done) {
    constexpr double LOOK_EVERY = 0.01;  // seconds between looks at the other ranks
    const double began = now();
    double looked = began;  // the last time at which this rank looked at the others
    double told = began;    // the last time at which it told them that it waits
    bool named = false;     // whether a rank that does not answer has been named
    while (!done()) {
        const double time = now();
        if (time < looked + LOOK_EVERY) continue;
        looked = time;
        const bool tells = time > told + patience / 6;
        if (tells) told = time;
        for (int rank = 0; rank < count(); rank++) {
            const Peer& peer = peers_[rank];
            if (peer.socket < 0) continue;
            look_at(rank, done);
            if (tells && rank != sending_to_) tell(peer.socket, WAITING);
            if (time < std::max(heard(rank), began) + patience) continue;  // it has answered lately
            if (!named && rank_ <= 1)  // rank 0 names the others, and rank 1 names rank 0
                std::fprintf(stderr, "train: Rank %d has not answered for %.0f s; waiting\n", rank, patience);
            named = true;
            if (!signal_received) continue;
            end(rank_ ? "" : concat("Interrupted while rank ", rank, " did not answer."),
                128 + signal_received);
        }
    }
}

// A rank that waits within a call of the CUDA driver reads no socket, and the call may never return: when a
// kernel runs for the first time, the driver waits for the GPU before it loads the kernel, and the GPU may be
// waiting for data from a rank that has ended. So a second thread checks whether a rank has ended.
void ProcessGroup::start_watch() {
    if (count() == 1) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the first thread
    watch_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}
void ProcessGroup::watch(const std::stop_token& stop) {
    std::vector<double> lived(peers_.size(), now());  // by rank: the last time at which it was alive
    while (!stop.stop_requested()) {
        ::usleep(20'000);
        for (int rank = 0; rank < count(); rank++) {
            pollfd closed{.fd = peers_[rank].socket, .events = POLLRDHUP, .revents = 0};
            if (::poll(&closed, 1, 0) <= 0) lived[rank] = now();
            if (now() < lived[rank] + grace) continue;
            while (has_sent(rank)) drop_message(rank);  // after its last message this ends the process
        }
    }
}

// Ends the process without destructors, which could wait for the GPU or for other ranks. The sentence is
// printed, unless it is empty. Rank 0 ends all other ranks.
void ProcessGroup::end(const std::string& sentence, int code) {
    if (!sentence.empty()) print_error(sentence);
    if (!sentence.empty() && !advice_after_error.empty()) print_error(advice_after_error);
    if (rank_ == 0)
        for (const Peer& peer : peers_) tell(peer.socket, ENDING);
    for (const pid_t child : children_) {
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, 0);
    }
    _exit(code);
}

// A rank other than 0 sends its sentence to rank 0, which ends all ranks and prints this sentence, or its own
// if it has failed itself. Rank 0 may be within a call of a driver or a library, and read nothing for long.
// Then this rank prints its sentence itself.
void ProcessGroup::fail(const std::string& sentence) {
    if (rank_ == 0) end(sentence);
    send(0, message_of(ENDING, sentence.data(), sentence.size()));
    ::shutdown(peers_[0].socket, SHUT_WR);
    const double deadline = now() + patience;
    wait_until([&] {
        if (has_sent(0)) drop_message(0);  // its values are of no use any more
        ::usleep(20'000);
        return now() > deadline;
    });
    end(sentence);
}

}  // namespace coat
