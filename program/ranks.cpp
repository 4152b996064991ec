// ranks.cpp - how the processes of a run start, find each other, exchange values and end together (ranks.h).
//
// Nothing runs beside the computation: a rank that waits for the others looks whether they still live. Only
// rank 0 prints errors, so the user sees one sentence, not one for each rank.
#include "ranks.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <tuple>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <omp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace coat {

volatile std::sig_atomic_t interrupted = 0;
double ProcessGroup::patience = 60;

namespace {

constexpr int MOST_RANKS = 1024;
constexpr uint64_t MOST_BYTES = uint64_t(1) << 33;  // of a message: no tensor has more

// A message is a header and so many bytes. FAILED has the sentence; the last three are empty. WAITING: I
// wait, too. ENDING, from rank 0: end, without a sentence. WELCOME, from rank 0: you are connected.
enum Kind : uint8_t { DATA = 'D', FAILED = 'F', WAITING = 'W', ENDING = 'E', WELCOME = 'C' };
struct __attribute__((packed)) Header {
    uint8_t kind;
    uint64_t size = 0;
};
void tell(int fd, Kind kind) {  // if there is room
    const Header message{kind};
    std::ignore = ::send(fd, &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Whether the other side can send no more. What it has sent before may still be there.
bool is_closed(int fd) {
    pollfd socket{fd, POLLRDHUP, 0};
    return ::poll(&socket, 1, 0) > 0;
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
struct Hello {
    char magic[4] = {'C', 'O', 'A', 'T'};
    uint32_t ranks, rank;
    char token[64] = {};
    Hello(int of, int which) : ranks(uint32_t(of)), rank(uint32_t(which)) {
        std::strncpy(token, std::getenv("COAT_TOKEN"), sizeof token - 1);
    }
};

// A socket that is connected with rank 0, or listens, at this address alone. -1: it is not possible.
int open_socket(const Launch& launch, bool listens, double seconds) {
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
        ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // also of connect()
        ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);  // and of accept()
        const int failed = listens ? ::bind(fd, at->ai_addr, at->ai_addrlen) || ::listen(fd, SOMAXCONN)
                                   : ::connect(fd, at->ai_addr, at->ai_addrlen);
        if (failed) ::close(fd), fd = -1;
    }
    if (found) ::freeaddrinfo(found);
    return fd;
}

// Rank 0 waits for the others, which connect in any order. It does not wait for anybody else who connects.
// Returns the sockets by rank; -1 where a rank has not connected in time.
std::vector<int> accept_others(int listening, int ranks, double seconds) {
    const double deadline = now() + seconds;
    std::vector<int> sockets(size_t(ranks), -1), callers;  // callers have not said enough yet
    pollfd listener{listening, POLLIN, 0};
    while (std::count(sockets.begin() + 1, sockets.end(), -1) > 0 && now() < deadline) {
        if (::poll(&listener, 1, 10) > 0)
            callers.push_back(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
        if (callers.size() > MOST_RANKS) ::close(callers[0]), callers.erase(callers.begin());
        for (int& fd : callers) {
            Hello hello(ranks, 0), ours = hello;
            const ssize_t got = ::recv(fd, &hello, sizeof hello, MSG_PEEK | MSG_DONTWAIT);
            if (got < 0 ? errno == EAGAIN : got > 0 && got < ssize_t(sizeof hello)) continue;
            ours.rank = hello.rank;
            const bool accepted = got > 0 && !std::memcmp(&hello, &ours, sizeof ours) && hello.rank > 0 &&
                                  hello.rank < ours.ranks && sockets[hello.rank] < 0;
            if (accepted) tell(sockets[hello.rank] = fd, WELCOME), ::recv(fd, &hello, sizeof hello, 0);
            else ::close(fd);
            fd = -1;
        }
        callers.erase(std::remove(callers.begin(), callers.end(), -1), callers.end());
    }
    for (const int fd : callers) ::close(fd);
    ::close(listening);
    return sockets;
}

// A variable of the environment.
int number(const char* name, int least, int most) {
    const char* const text = std::getenv(name) ? std::getenv(name) : "";
    char* end;
    const long value = std::strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most)
        throw Error(name, " is \"", text, "\"; set it to a number from ", least, " to ", most, ".");
    return int(value);
}

}  // namespace

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Launch find_launch(int64_t ranks_flag) {
    Launch launch;
    if (std::getenv("RANK") && std::getenv("WORLD_SIZE")) {
        launch.ranks = number("WORLD_SIZE", 1, MOST_RANKS);
        launch.rank = number("RANK", 0, launch.ranks - 1);
        launch.local = std::getenv("LOCAL_RANK") ? number("LOCAL_RANK", 0, MOST_RANKS - 1) : launch.rank;
    }
    if (ranks_flag > MOST_RANKS || (launch.ranks > 1 && ranks_flag > 0 && ranks_flag != launch.ranks))
        throw Error("--ranks ", ranks_flag, " is more than ", MOST_RANKS, ", or differs from WORLD_SIZE.");
    if (launch.ranks == 1) return {0, int(std::max<int64_t>(1, ranks_flag)), 0, "", 0};
    if (!std::getenv("MASTER_ADDR")) throw Error("MASTER_ADDR is not set; set it to the address of rank 0.");
    if (const char* const token = std::getenv("COAT_TOKEN"); !token || !*token)
        throw Error("COAT_TOKEN is not set; set it to a secret word, the same for every rank.");
    launch.address = std::getenv("MASTER_ADDR");
    launch.port = std::getenv("COAT_PORT") ? number("COAT_PORT", 1, 65535)
                                           : number("MASTER_PORT", 1, 65534) + 1;  // torchrun has MASTER_PORT
    return launch;
}

std::unique_ptr<ProcessGroup> ProcessGroup::start(const Launch& launch, double seconds) {
    if (launch.ranks == 1) return std::make_unique<ProcessGroup>();
    if (launch.address.empty()) return start_others(launch.ranks);
    const std::string place = concat(launch.address, ", port ", launch.port);
    const double deadline = now() + seconds;
    int fd = -1;
    do fd = open_socket(launch, launch.rank == 0, deadline - now());
    while (launch.rank && fd < 0 && now() < deadline && !::usleep(20000));
    const std::string cure = ", with the same WORLD_SIZE, MASTER_ADDR, COAT_PORT and COAT_TOKEN.";
    std::vector<int> sockets(size_t(launch.ranks), -1);
    if (launch.rank == 0) {
        if (fd < 0)
            throw Error("Rank 0 cannot listen at ", place, " (", std::strerror(errno),
                        "); set MASTER_ADDR to an address of its machine, COAT_PORT to a free port.");
        sockets = accept_others(fd, launch.ranks, seconds);
    } else {
        const Hello hello(launch.ranks, launch.rank);
        Header answer;
        if (::send(fd, &hello, sizeof hello, MSG_NOSIGNAL) < 0 ||
            ::recv(fd, &answer, sizeof answer, MSG_WAITALL) < 1)
            throw Error("Rank ", launch.rank, " cannot connect with rank 0 at ", place, "; start rank 0",
                        cure);
        sockets[0] = fd;
    }
    auto processes = std::make_unique<ProcessGroup>(launch.rank, launch.local, sockets);
    for (size_t r = 1; launch.rank == 0 && r < sockets.size(); r++)
        if (sockets[r] < 0)
            processes->fail(
                concat("Rank ", r, " has not connected with rank 0 at ", place, "; start it", cure));
    return processes;
}

ProcessGroup::ProcessGroup(int rank, int local, const std::vector<int>& sockets)
    : rank_(rank), local_(local) {
    for (const int fd : sockets) peers_.push_back({fd});
}

ProcessGroup::~ProcessGroup() {
    if (!std::uncaught_exceptions()) gather({}, true);
    for (const Peer& peer : peers_) ::close(peer.socket);
    for (const pid_t child : children) ::waitpid(child, nullptr, 0);
}

// Rank 0 reads from all before it sends to any; the others send before they read. So no two wait for each
// other, whatever the sizes are.
std::vector<Bytes> ProcessGroup::gather(const Bytes& mine, bool on_all) {
    std::vector<Bytes> parts(peers_.size());
    if (rank_ > 0) send(0, DATA, mine.data(), mine.size());
    for (int r = 0; r < count(); r++)
        if (r == rank_) parts[size_t(r)] = mine;
        else if (rank_ == 0 || on_all) parts[size_t(r)] = receive(rank_ == 0 ? r : 0);
    for (int to = 1; rank_ == 0 && on_all && to < count(); to++)
        for (int r = 0; r < count(); r++)
            if (r != to) send(to, DATA, parts[size_t(r)].data(), parts[size_t(r)].size());
    return parts;
}

void ProcessGroup::send(int to, char kind, const void* data, size_t size) {
    Header header{uint8_t(kind), size};
    transfer(to, POLLOUT, &header, sizeof header);
    transfer(to, POLLOUT, const_cast<void*>(data), size);
}

Bytes ProcessGroup::receive(int from) {
    pollfd socket{peers_[size_t(from)].socket, POLLIN, 0};
    wait_until([&] { return has_sent(from) || (::poll(&socket, 1, 20) > 0 && has_sent(from)); });
    Header header;
    transfer(from, POLLIN, &header, sizeof header);
    Bytes bytes(header.size);
    transfer(from, POLLIN, bytes.data(), bytes.size());
    return bytes;
}

// Sends these bytes (POLLOUT), or fills them with what the rank sends (POLLIN), and looks after the others.
void ProcessGroup::transfer(int rank, short direction, void* data, size_t size) {
    pollfd socket{peers_[size_t(rank)].socket, direction, 0};
    auto* at = static_cast<uint8_t*>(data);
    int& partner = direction == POLLOUT ? sending_to_ : receiving_from_;
    partner = rank;
    while (size > 0) {
        wait_until([&] { return ::poll(&socket, 1, 20) > 0; });
        const ssize_t n = direction == POLLOUT ? ::send(socket.fd, at, size, MSG_DONTWAIT | MSG_NOSIGNAL)
                                               : ::recv(socket.fd, at, size, MSG_DONTWAIT);
        if (n > 0) at += n, size -= size_t(n);
        else if (n == 0 || errno != EAGAIN) ended(rank);
    }
    partner = -1;
}

// Whether a value of this rank is there. Takes its WAITING messages. If it has failed or ended, or sends what
// none of our ranks would, this does not return.
bool ProcessGroup::has_sent(int rank) {
    Peer& peer = peers_[size_t(rank)];
    for (;;) {
        const bool closed = is_closed(peer.socket);  // before the message is looked at: so it is the last one
        Header next{};
        const bool whole =
            ::recv(peer.socket, &next, sizeof next, MSG_PEEK | MSG_DONTWAIT) == ssize_t(sizeof next);
        if (whole) peer.heard = now();
        if (whole && next.kind == DATA && next.size <= MOST_BYTES) return true;
        if (whole && next.kind == WAITING) ::recv(peer.socket, &next, sizeof next, 0);
        else if (whole || closed) ended(rank);
        else return false;
    }
}

void ProcessGroup::wait_until(const std::function<bool()>& done) {
    double looked = now(), told = looked;
    bool named = false;
    for (Peer& peer : peers_) peer.heard = looked;
    while (!done()) {
        const double time = now();
        if (time < looked + 0.01) continue;
        looked = time;
        const bool tells = time > told + patience / 6;
        if (tells) told = time;
        for (int r = 0; r < count(); r++) {
            const Peer& peer = peers_[size_t(r)];
            if (peer.socket < 0) continue;
            // A rank may end once it has sent the value that this one waits for.
            if (r != receiving_from_ && has_sent(r) && is_closed(peer.socket) && !done()) ended(r);
            if (tells && r != sending_to_) tell(peer.socket, WAITING);
            if (time < peer.heard + patience) continue;
            if (!named && rank_ <= 1)  // rank 1 speaks of rank 0
                std::fprintf(stderr, "train: Rank %d has not answered for %.0f s; waiting\n", r, patience);
            named = true;
            if (interrupted)
                end(rank_ ? "" : concat("Interrupted while rank ", r, " did not answer."), 128 + interrupted);
        }
    }
}

// Reads all that a rank still sends. What its last message was: FAILED, with a sentence, ENDING, or another.
uint8_t ProcessGroup::last_message(int rank, double seconds, std::string* sentence) {
    pollfd socket{peers_[size_t(rank)].socket, POLLIN, 0};
    std::string all;
    char part[1 << 16];
    ssize_t got = 1;
    for (const double until = now() + seconds; got > 0 && now() < until;) {
        if (::poll(&socket, 1, 20) <= 0) continue;
        got = ::recv(socket.fd, part, sizeof part, 0);
        if (got > 0) all.append(part, size_t(got));
    }
    Header last{};
    for (size_t at = 0; all.size() - at >= sizeof last; at += last.size) {
        std::memcpy(&last, &all[at], sizeof last);
        at += sizeof last;
        if (last.size > all.size() - at) return 0;
        sentence->assign(all, at, last.size);
    }
    return last.kind;
}

void ProcessGroup::ended(int rank) {
    std::string sentence;
    const uint8_t last = last_message(rank, 5, &sentence);
    if (last == FAILED) end(concat("Rank ", rank, ": ", sentence));
    if (last == ENDING || rank_ > 1) end("");
    end(concat("Rank ", rank, " has ended unexpectedly (killed, or out of memory?); start again."));
}

void ProcessGroup::end(const std::string& sentence, int code) {
    if (!sentence.empty()) print_error(sentence);
    if (!sentence.empty() && !advice.empty()) print_error(advice);
    for (const Peer& peer : peers_)
        if (rank_ == 0) tell(peer.socket, ENDING);
    for (const pid_t child : children) ::kill(child, SIGKILL);
    for (const pid_t child : children) ::waitpid(child, nullptr, 0);
    _exit(code);
}

// Other ranks give their sentence to rank 0, which prints it or its own. Without rank 0 they print it.
void ProcessGroup::fail(const std::string& sentence) {
    if (rank_ == 0) end(sentence);
    std::string unused;
    send(0, FAILED, sentence.data(), sentence.size());
    ::shutdown(peers_[0].socket, SHUT_WR);
    end(last_message(0, patience, &unused) == ENDING ? "" : sentence);
}

}  // namespace coat
