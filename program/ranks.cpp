// ranks.cpp - how the processes of a run start, find each other, exchange values and end together (ranks.h).
//
// A rank that waits for the others looks whether they still live. Rank 0 prints errors, unless it is gone.
#include "ranks.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <omp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace coat {

namespace {

constexpr int MOST_RANKS = 1024;
constexpr uint64_t MOST_BYTES = uint64_t(1)
                                << 33;  // of a rank's value: no tensor of coat.h's models has more

// A message is a header and so many bytes. DATA: a value. WAITING: I am here, and wait, too. ENDING: all
// ranks end; one that has failed gives its sentence, which rank 0 prints.
enum Kind : uint8_t { DATA = 'D', WAITING = 'W', ENDING = 'E' };
struct __attribute__((packed)) Header {
    uint8_t kind;
    uint64_t size = 0;
};
Bytes message_of(Kind kind, const void* data, size_t size) {
    const Header header{kind, size};
    Bytes message(sizeof header + size);
    std::memcpy(message.data(), &header, sizeof header);
    if (size) std::memcpy(&message[sizeof header], data, size);
    return message;
}

// The values of all ranks as rank 0 sends them to the others: the size of each, then the bytes of each.
Bytes join(const std::vector<Bytes>& values) {
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

// The inverse of join(); no values if these bytes are not those of `count` values.
std::vector<Bytes> split(const Bytes& joined, size_t count) {
    std::vector<uint64_t> sizes(count);
    const size_t header = count * sizeof(uint64_t);
    if (joined.size() < header) return {};
    std::memcpy(sizes.data(), joined.data(), header);
    std::vector<Bytes> values;
    size_t at = header;
    for (const uint64_t size : sizes) {
        if (size > joined.size() - at) return {};
        values.emplace_back(joined.begin() + static_cast<int64_t>(at),
                            joined.begin() + static_cast<int64_t>(at + size));
        at += size;
    }
    return values;
}

void tell(int fd, Kind kind) {  // if there is room
    const Header message{kind};
    ::send(fd, &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

std::vector<pid_t> children;  // of rank 0, if it has started the other ranks

// Starts the other ranks of --ranks, each with a socket that no other program can reach.
std::unique_ptr<ProcessGroup> start_others(int ranks) {
    if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(std::max(1, omp_get_num_procs() / ranks));
    std::fflush(nullptr);
    std::vector<int> sockets = {-1};
    for (int rank = 1; rank < ranks; rank++) {
        int ends[2];
        const bool connected = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
        const pid_t child = connected ? ::fork() : -1;
        if (child < 0)
            ProcessGroup(0, 0, sockets).fail(concat("A process cannot start (", std::strerror(errno), ")."));
        if (child == 0) {
            for (const int fd : sockets) ::close(fd);
            ::close(ends[0]);
            children.clear();
            sockets.assign(size_t(ranks), -1);
            sockets[0] = ends[1];
            return std::make_unique<ProcessGroup>(rank, rank, sockets);
        }
        ::close(ends[1]);
        children.push_back(child);
        sockets.push_back(ends[0]);
    }
    return std::make_unique<ProcessGroup>(0, 0, sockets);
}

// What a rank that torchrun has started says when it connects.
constexpr size_t HELLO = 96;
std::string hello(int ranks, int rank) {
    std::string text = concat("COAT rank ", rank, " of ", ranks, ", ", std::getenv("COAT_TOKEN"));
    text.resize(HELLO);
    return text;
}

// A socket that is connected with rank 0, or on rank 0 listens, at its address alone. -1: it is not possible.
int open_socket(const Launch& launch, double seconds) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (::getaddrinfo(launch.address.c_str(), std::to_string(launch.port).c_str(), &hints, &found))
        errno = EADDRNOTAVAIL;
    int fd = -1;
    for (const addrinfo* at = found; at && fd < 0; at = at->ai_next) {
        fd = ::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int on = 1;
        const timeval limit{time_t(std::max(1.0, seconds)), 0};
        ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // the port of a run that has just ended
        ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        for (const int wait : {SO_SNDTIMEO, SO_RCVTIMEO})  // also of connect()
            ::setsockopt(fd, SOL_SOCKET, wait, &limit, sizeof limit);
        const int failed = launch.rank == 0
                               ? ::bind(fd, at->ai_addr, at->ai_addrlen) || ::listen(fd, SOMAXCONN)
                               : ::connect(fd, at->ai_addr, at->ai_addrlen);
        if (failed) ::close(fd), fd = -1;
    }
    if (found) ::freeaddrinfo(found);
    return fd;
}

// Rank 0 waits for the others, which connect in any order, and for nobody else who connects. Returns the
// sockets by rank; -1 where a rank has not connected in time.
std::vector<int> accept_others(int listening, int ranks, double deadline) {
    std::vector<int> sockets(size_t(ranks), -1), callers;  // callers have not said enough yet
    pollfd listener{listening, POLLIN, 0};
    while (std::count(sockets.begin() + 1, sockets.end(), -1) > 0 && now() < deadline) {
        if (::poll(&listener, 1, 10) > 0)
            callers.push_back(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
        if (callers.size() > MOST_RANKS) ::close(callers[0]), callers.erase(callers.begin());
        for (int& fd : callers) {
            std::string said(HELLO, 0);
            const ssize_t got = ::recv(fd, said.data(), HELLO, MSG_PEEK | MSG_DONTWAIT);
            if (got < 0 ? errno == EAGAIN : got > 0 && got < ssize_t(HELLO)) continue;
            int rank = 1;
            while (rank < ranks && (sockets[size_t(rank)] >= 0 || said != hello(ranks, rank))) rank++;
            if (rank < ranks) tell(sockets[size_t(rank)] = fd, WAITING), ::recv(fd, said.data(), HELLO, 0);
            else ::close(fd);
            fd = -1;
        }
        callers.erase(std::remove(callers.begin(), callers.end(), -1), callers.end());
    }
    for (const int fd : callers) ::close(fd);
    ::close(listening);
    return sockets;
}

// Variables of the environment.
std::string variable(const char* name) {
    if (const char* const text = std::getenv(name); text && *text) return text;
    throw Error(name, " is not set; all ranks need one MASTER_ADDR, MASTER_PORT and COAT_TOKEN, a secret.");
}
int number(const char* name, int least, int most) {
    const std::string text = variable(name);
    char* end;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (*end || value < least || value > most)
        throw Error(name, " is \"", text, "\"; set it to a number from ", least, " to ", most, ".");
    return int(value);
}

}  // namespace

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Launch find_launch(int64_t ranks_flag) {
    const bool launched = std::getenv("RANK") && std::getenv("WORLD_SIZE");
    const int ranks = launched ? number("WORLD_SIZE", 1, MOST_RANKS) : 1;
    if (ranks_flag > MOST_RANKS || (ranks > 1 && ranks_flag > 0 && ranks_flag != ranks))
        throw Error("--ranks ", ranks_flag, " is more than ", MOST_RANKS, ", or differs from WORLD_SIZE.");
    if (ranks == 1) return {0, int(std::max<int64_t>(1, ranks_flag)), 0, "", 0};
    Launch launch{number("RANK", 0, ranks - 1), ranks, 0, variable("MASTER_ADDR"), 0};
    variable("COAT_TOKEN");
    launch.local = std::getenv("LOCAL_RANK") ? number("LOCAL_RANK", 0, MOST_RANKS - 1) : launch.rank;
    launch.port = std::getenv("COAT_PORT") ? number("COAT_PORT", 1, 65535)
                                           : number("MASTER_PORT", 1, 65534) + 1;  // torchrun has MASTER_PORT
    return launch;
}

std::unique_ptr<ProcessGroup> ProcessGroup::start(const Launch& launch, double seconds) {
    if (launch.address.empty()) return start_others(launch.ranks);
    const std::string place = concat(launch.address, ", port ", launch.port);
    const double deadline = now() + seconds;
    int fd = open_socket(launch, seconds);
    std::vector<int> sockets(size_t(launch.ranks), -1);
    if (launch.rank == 0) {
        if (fd < 0)
            throw Error("Rank 0 cannot listen at ", place, " (", std::strerror(errno),
                        "); set MASTER_ADDR to an address of its machine, COAT_PORT to a free port.");
        sockets = accept_others(fd, launch.ranks, deadline);
    } else {
        while (fd < 0 && now() < deadline && !::usleep(20000)) fd = open_socket(launch, deadline - now());
        Header answer;
        ::send(fd, hello(launch.ranks, launch.rank).data(), HELLO, MSG_NOSIGNAL);
        if (::recv(fd, &answer, sizeof answer, MSG_WAITALL) == sizeof answer) sockets[0] = fd;
    }
    auto processes = std::make_unique<ProcessGroup>(launch.rank, launch.local, sockets);
    for (int r = 0; r < (launch.rank ? 1 : launch.ranks); r++) {
        if (r == launch.rank || sockets[size_t(r)] >= 0) continue;
        const std::string sentence =
            concat("Rank ", std::max(r, launch.rank), " has not connected with rank 0 at ", place,
                   "; start both, with the same WORLD_SIZE, MASTER_ADDR, COAT_PORT and COAT_TOKEN.");
        if (launch.rank) throw Error(sentence);
        processes->fail(sentence);
    }
    return processes;
}

ProcessGroup::ProcessGroup(int rank, int local, const std::vector<int>& sockets)
    : rank_(rank), local_(local), peers_(sockets.size()) {
    for (size_t r = 0; r < sockets.size(); r++) peers_[r].socket = sockets[r];
}

ProcessGroup::~ProcessGroup() {
    if (!std::uncaught_exceptions()) gather({}, true);
    for (const Peer& peer : peers_) ::close(peer.socket);
    for (const pid_t child : children) ::waitpid(child, nullptr, 0);
}

// Rank 0 reads from all before it sends to any; the others send first. So no two wait for each other. Each
// rank sends and gets one message, however many ranks there are.
std::vector<Bytes> ProcessGroup::gather(const Bytes& mine, bool on_all) {
    std::vector<Bytes> values(peers_.size());
    values[static_cast<size_t>(rank_)] = mine;
    if (rank_ == 0) {
        for (int from = 1; from < count(); from++) values[static_cast<size_t>(from)] = receive(from);
        if (!on_all || count() == 1) return values;
        const Bytes joined = join(values), message = message_of(DATA, joined.data(), joined.size());
        for (int to = 1; to < count(); to++) send(to, message);
        return values;
    }
    send(0, message_of(DATA, mine.data(), mine.size()));
    if (!on_all) return values;
    values = split(receive(0), peers_.size());
    if (values.empty())
        end("Rank 0 has sent something else than values; start the same program on all ranks.");
    return values;
}

void ProcessGroup::send(int to, const Bytes& message) {
    size_t sent = 0;
    pollfd socket{peers_[size_t(to)].socket, POLLOUT, 0};
    sending_to_ = to;
    wait_until([&] {
        if (::poll(&socket, 1, 20) <= 0) return false;
        const ssize_t n =
            ::send(socket.fd, &message[sent], message.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        sent += size_t(std::max<ssize_t>(0, n));
        return sent == message.size();
    });
    sending_to_ = -1;
}

Bytes ProcessGroup::receive(int from) {
    Peer& peer = peers_[size_t(from)];
    pollfd socket{peer.socket, POLLIN, 0};
    wait_until([&] { return has_sent(from) || (::poll(&socket, 1, 20) > 0 && has_sent(from)); });
    Bytes value(peer.message.begin() + sizeof(Header), peer.message.end());
    peer.message = {}, peer.got = 0;
    return value;
}

// Whether the next value of this rank is there; reads what has come of it. If the rank has failed or ended,
// or sends what none of ours would, so does this process.
bool ProcessGroup::has_sent(int rank) {
    Peer& peer = peers_[size_t(rank)];
    for (;;) {
        Header header{0};
        if (peer.got >= sizeof header) std::memcpy(&header, peer.message.data(), sizeof header);
        if (header.size > MOST_BYTES * peers_.size()) break;
        peer.message.resize(sizeof header + header.size);
        if (const size_t missing = peer.message.size() - peer.got) {
            const ssize_t n = ::recv(peer.socket, &peer.message[peer.got], missing, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN) return false;
            if (n <= 0) break;
            peer.got += size_t(n), peer.heard = now();
            continue;
        }
        if (header.kind == DATA) return true;
        const std::string sentence(peer.message.begin() + sizeof header, peer.message.end());
        if (header.kind == ENDING) end(sentence.empty() ? "" : concat("Rank ", rank, ": ", sentence));
        peer.got = 0;
    }
    end(rank_ > 1 ? "" : concat("Rank ", rank, " has ended unexpectedly (killed?); start again."));
}

void ProcessGroup::wait_until(const std::function<bool()>& done) {
    const double began = now();
    double looked = began, told = began;
    bool named = false;
    while (!done()) {
        const double time = now();
        if (time < looked + 0.01) continue;
        looked = time;
        const bool tells = time > told + patience / 6;
        if (tells) told = time;
        for (int r = 0; r < count(); r++) {
            Peer& peer = peers_[size_t(r)];
            if (peer.socket < 0) continue;
            // A rank may end once it has sent the value that this one waits for. No other value is of use
            // then, but its last message may say why.
            pollfd closed{peer.socket, POLLRDHUP, 0};
            while (has_sent(r) && ::poll(&closed, 1, 0) > 0 && !done()) peer.got = 0;
            if (tells && r != sending_to_) tell(peer.socket, WAITING);
            if (time < std::max(peer.heard, began) + patience) continue;
            if (!named && rank_ <= 1)  // rank 1 speaks of rank 0
                std::fprintf(stderr, "train: Rank %d has not answered for %.0f s; waiting\n", r, patience);
            named = true;
            if (interrupted)
                end(rank_ ? "" : concat("Interrupted while rank ", r, " did not answer."), 128 + interrupted);
        }
    }
}

void ProcessGroup::end(const std::string& sentence, int code) {
    if (!sentence.empty()) print_error(sentence);
    if (!sentence.empty() && !checkpoint.empty())
        print_error("The last complete checkpoint is " + checkpoint + "; continue it with --resume.");
    for (const Peer& peer : peers_)
        if (rank_ == 0) tell(peer.socket, ENDING);
    for (const pid_t child : children) ::kill(child, SIGKILL), ::waitpid(child, nullptr, 0);
    _exit(code);
}

// Another rank gives its sentence to rank 0, which prints it or its own, and waits for the end.
void ProcessGroup::fail(const std::string& sentence) {
    if (rank_ == 0) end(sentence);
    send(0, message_of(ENDING, sentence.data(), sentence.size()));
    ::shutdown(peers_[0].socket, SHUT_WR);
    // It may be within a call, of a driver or a library, that reads nothing: then this rank prints it.
    const double deadline = now() + patience;
    wait_until([&] {
        if (has_sent(0)) peers_[0].got = 0;
        return ::usleep(20000), now() > deadline;
    });
    end(sentence);
}

}  // namespace coat
