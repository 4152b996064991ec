// processes.cpp (tests) - ranks start, find each other, exchange values, and end together in one sentence.
// Where none fails, they are threads. Other ranks are forked from the test: they use neither its checks nor
// OpenMP.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <omp.h>
#include <sys/wait.h>
#include <thread>

#include "../program/clock.h"
#include "../program/processes.h"
#include "help/program.h"

using namespace coat;
using namespace coat::test;

// Exactly these variables of launchers are set: TOKEN alone outside of the next test.
static void set(const std::string& variables) {
    for (const char* name :
         {"COAT_PORT", "COAT_TOKEN", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})
        unsetenv(name);
    std::istringstream words(variables);
    for (std::string name, value; std::getline(words, name, '=') && std::getline(words, value, ' ');)
        setenv(name.c_str(), value.c_str(), 1);
}
const std::string TOKEN = "COAT_TOKEN=secret ";
const int token = (set(TOKEN), 0);

using Body = std::function<void(ProcessGroup&)>;
const Body GATHERS = [](ProcessGroup& ranks) { ranks.all_gather(1); };
constexpr int RANKS = 3;
constexpr int AT_ONCE = 60;  // seconds: ranks that end at once need fewer, even if the machine is busy
namespace {

enum How { BY_RANK_0, ONE_BY_ONE };  // as with --ranks, or as torchrun does

// What ranks do, each in its process: their exit codes (128 and the signal), and what they print on stderr.
// Of ranks that rank 0 starts, only its own code is known.
struct Played {
    std::vector<int> codes;
    std::string error;
    double seconds = now();
    inline static double grace = 2 * AT_ONCE;  // ProcessGroup's: what ends only after it does not end at once

    Played(How how, const Body& body, const std::vector<int>& present = {0, 1, 2}, int port = free_port(),
           const std::function<void(int)>& before = {}) {
        const Folder folder;
        std::fflush(nullptr);  // else every process prints what is left
        const bool complete = present.size() == RANKS && !before;
        int alive[2];  // a pipe that ends with the last of the processes
        REQUIRE(pipe(alive) == 0);
        std::vector<pid_t> pids;
        for (int rank : how == BY_RANK_0 ? std::vector<int>{0} : present) {
            pids.push_back(fork());
            if (pids.back() > 0) continue;
            close(alive[0]);
            dup2(open((folder / "error").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
            ProcessGroup::patience = 2 * AT_ONCE;
            ProcessGroup::grace = grace;
            std::unique_ptr<ProcessGroup> ranks;
            try {
                if (before) before(rank);
                ranks = ProcessGroup::start({rank, RANKS, rank, how == BY_RANK_0 ? "" : "127.0.0.1", port},
                                            complete ? 20 : 1.5);
                body(*ranks);
                ranks.reset();
            } catch (const std::exception& failure) {
                if (ranks) ranks->fail(failure.what());
                print_error(failure.what());
                _exit(1);
            }
            _exit(0);
        }
        close(alive[1]);
        for (pid_t pid : pids) {
            int status = 0;
            waitpid(pid, &status, 0);
            codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
        }
        char unused;
        CHECK(read(alive[0], &unused, 1) == 0);  // no process is left
        close(alive[0]);
        seconds = now() - seconds;
        if (fs::exists(folder / "error")) error = read_file(folder / "error");
    }
    // sentence: a part of the only line on stderr; "": there is none.
    void check(const std::vector<int>& expected, const std::string& sentence) const {
        CAPTURE(error);
        CHECK(codes == std::vector<int>(expected.begin(), expected.begin() + long(codes.size())));
        CHECK(std::count(error.begin(), error.end(), '\n') == (sentence.empty() ? 0 : 1));
        CHECK(contains(error, (sentence.empty() ? "" : "train: ") + sentence));
        CHECK(seconds < AT_ONCE);
    }
};

}  // namespace

static void sleep_ms(int milliseconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// The addresses at which some process listens at this port, as /proc has them: 0100007F is 127.0.0.1.
static std::string listening(int port) {
    char wanted[32];  // the port, any other side, and the state LISTEN
    std::snprintf(wanted, sizeof wanted, ":%04X 00000000:0000 0A", unsigned(port));
    std::string found;
    for (const std::string& line : lines_of(read_file("/proc/net/tcp")))
        if (const size_t at = line.find(wanted); at != line.npos) found += line.substr(at - 8, 8);
    return found;
}

TEST_CASE("find_launch: torchrun says which rank this is; else --ranks says how many to start") {
    const std::string torchrun = TOKEN + "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=n0 MASTER_PORT=29500 ";
    const std::tuple<std::string, int64_t, Launch> rows[] = {
        {"", 0, {0, 1, 0, "", 0}},
        {"", 4, {0, 4, 0, "", 0}},
        {"RANK=0 WORLD_SIZE=1", 2, {0, 2, 0, "", 0}},
        {torchrun, 0, {5, 8, 1, "n0", 29501}},  // torchrun itself listens at MASTER_PORT
        {torchrun, 8, {5, 8, 1, "n0", 29501}},
        {torchrun + "COAT_PORT=4000", 0, {5, 8, 1, "n0", 4000}}};
    for (const auto& [values, flag, expected] : rows) {
        set(values);
        const Launch got = find_launch(flag), &want = expected;
        CHECK((got.rank == want.rank && got.ranks == want.ranks && got.local_rank == want.local_rank));
        CHECK((got.address == want.address && got.port == want.port));
    }
    for (const std::string wrong :
         {"RANK=8", "RANK=1x", "WORLD_SIZE=2000", "WORLD_SIZE=0", "MASTER_PORT=65535", "MASTER_ADDR= ",
          "COAT_TOKEN= ", "COAT_TOKEN=12345678901234567890123456789012345678901234567890123456789012345"}) {
        set(torchrun + wrong);
        check_error([] { find_launch(0); }, wrong.substr(0, wrong.find('=')) + " is ");
    }
    set(torchrun);
    check_error([] { find_launch(1); }, "--ranks 1");
    set(TOKEN);
    check_error([] { find_launch(1025); }, "--ranks 1025");
}

TEST_CASE("ranks: every rank gets the values of all whatever their sizes; rank 0 may get them alone") {
    for (int count = 1; count <= 4; count++) {
        const int port = free_port();
        auto run = [&](int me) {
            const auto processes = ProcessGroup::start({me, count, me, "127.0.0.1", port});
            ProcessGroup& ranks = *processes;
            CHECK((ranks.rank() == me && ranks.count() == count && ranks.local_rank() == me));
            std::vector<Bytes> expected;
            for (int r = 0; r < count; r++) expected.push_back(Bytes(size_t(r) * 2'000'000, uint8_t(r + 1)));
            const Bytes& mine = expected[size_t(me)];
            CHECK((ranks.all_gather(mine) == expected && ranks.gather(mine, true) == expected));
            const std::vector<Bytes> alone = ranks.gather(mine, false);
            CHECK((me > 0 || alone == expected));
            CHECK(ranks.all_gather(std::string(me, 'x')).back() == std::string(count - 1, 'x'));
            int wrong = 0;
            for (int64_t i = 0; i < 500; i++)
                for (int r = 0; r < count; r++) wrong += ranks.all_gather(i + me)[size_t(r)] != i + r;
            CHECK(wrong == 0);
        };
        std::vector<std::thread> threads;
        for (int rank = 0; rank < count; rank++) threads.emplace_back(run, rank);
        for (std::thread& thread : threads) thread.join();
    }
}

TEST_CASE("ranks: rank 0 answers every rank with one message however many ranks there are") {
    constexpr int COUNT = 40;
    std::vector<int> sockets = {-1}, others;
    for (int rank = 1; rank < COUNT; rank++) {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        const std::string value = "D" + std::string("\x04\0\0\0\0\0\0\0", 8) + "abcd";
        for (const std::string& message : {value, "D" + std::string(8, '\0')})  // the last is for the end
            REQUIRE(send(ends[1], message.data(), message.size(), 0) == ssize_t(message.size()));
        sockets.push_back(ends[0]);
        others.push_back(ends[1]);
    }
    {
        ProcessGroup ranks(0, 0, sockets);
        CHECK(ranks.gather({'a', 'b', 'c', 'd'}, true) == std::vector<Bytes>(COUNT, {'a', 'b', 'c', 'd'}));
        for (int other : others) {
            struct __attribute__((packed)) {
                char kind = 0;
                uint64_t size = 0;
            } header;
            CHECK(recv(other, &header, sizeof header, 0) == ssize_t(sizeof header));
            CHECK((header.kind == 'D' && header.size >= (COUNT - 1) * 4));
            std::string message(4096, '\0');
            const ssize_t rest = recv(other, message.data(), message.size(), MSG_DONTWAIT);
            CHECK(rest == ssize_t(header.size));  // nothing follows
        }
    }
    for (int other : others) close(other);
}

TEST_CASE("ranks: one that fails or dies ends all within seconds and the user sees one sentence") {
    const std::string full = "The disk is full; free some space.", ended = " has ended unexpectedly";
    // The GPU of each rank waits for that of another: nothing comes through the sockets.
    auto waits = [](ProcessGroup& ranks) { ranks.wait_until([] { return false; }); };
    auto dies = [](ProcessGroup&) { raise(SIGKILL); };
    auto leaves = [](ProcessGroup&) { _exit(0); };
    auto fails = [&](ProcessGroup&) { throw Error(full); };
    const std::tuple<Body, int, std::string> ends[] = {
        {fails, 1, ": " + full}, {dies, 137, ended}, {leaves, 0, ended}};
    for (How how : {BY_RANK_0, ONE_BY_ONE}) {
        CAPTURE(how);
        // Rank 1 is ready before the others, which look whether it still lives.
        Played(how, [](ProcessGroup& ranks) {
            ranks.all_gather(1);
            const double start = now();
            if (ranks.rank() != 1) ranks.wait_until([=] { return now() > start + 0.3; });
        }).check({0, 0, 0}, "");
        for (int rank : {0, 1, 2})
            for (const auto& [action, code, says] : ends)
                // The others wait for its value; or for something else, say their GPU for that of this rank.
                for (const bool elsewhere : {false, true}) {
                    if (rank == 0 && code == 0) continue;
                    const Body body = [&, act = action](ProcessGroup& ranks) {
                        ranks.all_gather(1);
                        if (ranks.rank() == rank) sleep_ms(elsewhere ? 100 : 0), act(ranks);
                        if (elsewhere) waits(ranks);
                        for (;;) ranks.all_gather(Bytes(100'000));
                    };
                    std::vector<int> codes = {1, 1, 1};
                    codes[size_t(rank)] = code;
                    Played(how, body).check(codes, rank || code != 1 ? concat("Rank ", rank, says) : full);
                }
        // All find the same error: rank 0 prints it, though it is the last.
        Played(how, [&](ProcessGroup& ranks) {
            if (ranks.rank() == 0) sleep_ms(200);
            throw Error(full);
        }).check({1, 1, 1}, "The disk");
        // One has sent its value and ends. The other waits for it elsewhere, and rank 0 for the other: rank 0
        // has read the value of rank 1, but not that of rank 2.
        for (int ends : {1, 2})
            for (const bool killed : {false, true}) {
                std::vector<int> codes = {1, 1, 1};
                if (killed) codes[size_t(ends)] = 137;
                Played(how, [&](ProcessGroup& ranks) {
                    if (ranks.rank() == ends) ranks.gather({1}, false), killed ? dies(ranks) : fails(ranks);
                    if (ranks.rank() != 0) waits(ranks);
                    ranks.all_gather(uint8_t(1));
                }).check(codes, concat("Rank ", ends, killed ? ended : ": " + full));
            }
    }
}

TEST_CASE("ranks: one that hangs is named once and if it goes on so does the run") {
    for (int hangs : {0, 2})
        for (bool elsewhere : {false, true}) {  // what the others wait for does not come by the sockets
            INFO(hangs, " ", elsewhere);
            Played(elsewhere ? BY_RANK_0 : ONE_BY_ONE, [=](ProcessGroup& ranks) {
                const double start = now();
                ProcessGroup::patience = 0.8;
                if (ranks.rank() == hangs) sleep_ms(1600);
                else if (elsewhere) ranks.wait_until([=] { return now() > start + 1.5; });
                for (int i = 0; i < 3; i++) ranks.all_gather(1);
            }).check({0, 0, 0}, concat("Rank ", hangs, " has not answered for 1 s; waiting\n"));
        }
}

TEST_CASE("ranks: one that fails while rank 0 reads nothing prints its sentence itself and ends") {
    const Played played(ONE_BY_ONE, [](ProcessGroup& ranks) {
        ProcessGroup::patience = 0.5;
        if (ranks.rank() == 2) throw Error("The GPU is gone.");
        sleep_ms(1500);  // as within a call of a library
        ranks.all_gather(1);
    });
    CHECK(played.codes == std::vector<int>{1, 1, 1});
    CHECK(contains(played.error, "train: The GPU is gone.\n"));
}

TEST_CASE("ranks: one that dies or fails while another reads nothing ends that one after some seconds") {
    for (How how : {BY_RANK_0, ONE_BY_ONE})
        for (const bool fails : {false, true}) {
            Played::grace = 0.5;
            Played(how, [=](ProcessGroup& ranks) {
                ranks.all_gather(1);
                if (ranks.rank() == 2 && fails) throw Error("The GPU is gone.");
                if (ranks.rank() == 2) raise(SIGKILL);
                sleep_ms(2 * 1000 * AT_ONCE);  // as within a call of the driver that never returns
            }).check({1, 1, fails ? 1 : 137}, fails ? "Rank 2: The GPU is gone." : "Rank 2 has ended");
            Played::grace = 2 * AT_ONCE;
        }
}

TEST_CASE("ranks: a signal ends the run while a rank hangs and the processes that rank 0 has started") {
    const Played played(BY_RANK_0, [](ProcessGroup& ranks) {
        ProcessGroup::patience = 1;
        if (ranks.rank() == 2) raise(SIGSTOP);
        signal_received = SIGINT;  // as a handler does
        ranks.all_gather(1);
    });
    CHECK(played.codes == std::vector<int>{128 + SIGINT});
    CHECK(contains(played.error, "Interrupted while rank 2 did not answer."));
    CHECK(played.seconds < AT_ONCE);
}

TEST_CASE("ranks: a message that is too long or no message is not read") {
    for (const std::string& bytes : {"D" + std::string(8, '\xFF'), "D" + std::string(7, 1) + "\x7F",
                                     std::string("Hello, rank 0."), std::string("W")})
        Played(ONE_BY_ONE, [&](ProcessGroup& ranks) {
            int ends[2];
            if (ranks.rank() > 0) _exit(0);
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 &&
                write(ends[1], bytes.data(), bytes.size()) > 0 && shutdown(ends[1], SHUT_WR) == 0)
                ProcessGroup(0, 0, {-1, ends[0]}).all_gather(1);
        }).check({1, 0, 0}, "Rank 1 has ended unexpectedly");
}

TEST_CASE("ranks: who says nothing is waited for for a second; who says something else is sent away") {
    const int port = free_port();
    auto connected = [&](const std::string& text) {  // a socket through which this was sent
        const sockaddr_in at = loopback(port);
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        while (connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) usleep(1000);
        CHECK(send(fd, text.data(), text.size(), MSG_NOSIGNAL) == ssize_t(text.size()));
        return fd;
    };
    auto hello = [](int ranks, int rank, const char* token) {
        std::string text = concat("COAT rank ", rank, " of ", ranks, ", ", token);
        text.resize(96);
        return text;
    };
    std::thread rank_0([&] { CHECK(ProcessGroup::start({0, 2, 0, "127.0.0.1", port})->count() == 2); });
    std::vector<int> open;
    for (const char* text : {"", "COA", "GET / HTTP/1.1"}) open.push_back(connected(text));
    char answer[9];
    for (const std::string& text :
         {hello(2, 1, "wrong"), hello(2, 1, ""), hello(2, 1, "secret2"), hello(3, 1, "secret"),
          hello(2, 2, "secret"), hello(2, 0, "secret"), std::string(100, 'x')}) {
        open.push_back(connected(text));
        CHECK(recv(open.back(), answer, 9, 0) <= 0);  // closed
    }
    const std::string right = hello(2, 1, "secret");  // in two parts
    const int fd = connected(right.substr(0, 40));
    sleep_ms(300);
    CHECK(send(fd, &right[40], 56, 0) == 56);
    CHECK(recv(fd, answer, 9, MSG_WAITALL) == 9);
    const std::string nothing = "D" + std::string(8, 0);  // rank 0 waits for this at the end
    CHECK(send(fd, nothing.data(), 9, 0) == 9);
    rank_0.join();
    open.push_back(fd);
    for (int other : open) close(other);
}

TEST_CASE("ranks: one that is missing or is there twice or has another token is an error after some time") {
    const std::string alone = " has not connected with rank 0 at 127.0.0.1, port";
    Played(ONE_BY_ONE, GATHERS, {0, 1}).check({1, 1}, "Rank 2" + alone);
    Played(ONE_BY_ONE, GATHERS, {1}).check({1}, "Rank 1" + alone);
    // Rank 0 may come last.
    Played(ONE_BY_ONE, GATHERS, {0, 1, 2}, free_port(), [](int rank) {
        if (rank == 0) sleep_ms(300);
    }).check({0, 0, 0}, "");
    for (const std::vector<int>& present : {std::vector<int>{0, 1, 1, 2}, {0, 1, 2}}) {
        const Played played(ONE_BY_ONE, GATHERS, present, free_port(), [&](int rank) {
            if (rank == 2) sleep_ms(300), setenv("COAT_TOKEN", present.size() == 3 ? "other" : "secret", 1);
        });
        CHECK(std::count(played.codes.begin(), played.codes.end(), 1) == (present.size() == 3 ? 3 : 1));
        CHECK(contains(played.error, "has not connected with rank 0"));
        CHECK(contains(played.error, "COAT_TOKEN"));
    }
    // Rank 0 is killed while it waits for rank 2; rank 1 has reached it.
    Played(ONE_BY_ONE, GATHERS, {0, 1}, free_port(), [](int rank) {
        if (rank == 0) std::thread([] { sleep_ms(600), raise(SIGKILL); }).detach();
    }).check({137, 1}, "Rank 0 has ended unexpectedly");
}

TEST_CASE("ranks: rank 0 listens at MASTER_ADDR alone and not longer than it must") {
    const int port = free_port();
    const Launch rank_0{0, 2, 0, "127.0.0.2", port}, rank_1{1, 2, 1, "127.0.0.2", port};
    std::thread first([&] { ProcessGroup::start(rank_0); });
    std::string found;
    while ((found = listening(port)).empty()) sleep_ms(1);
    CHECK(found == "0200007F");
    {
        const auto second = ProcessGroup::start(rank_1);
        for (int i = 0; i < 500 * AT_ONCE && !listening(port).empty(); i++) sleep_ms(2);
        CHECK(listening(port) == "");
    }
    first.join();
    // The next run may have the port at once, but not two runs at a time.
    for (int i = 0; i < 3; i++) Played(ONE_BY_ONE, GATHERS, {0, 1, 2}, port).check({0, 0, 0}, "");
    const Bound bound;
    listen(bound.fd, 1);
    for (const Launch& launch : {Launch{0, 2, 0, "127.0.0.1", bound.port},
                                 {0, 2, 0, "192.0.2.1", port},
                                 {0, 2, 0, "no.such.host.invalid", port}})
        check_error([&] { ProcessGroup::start(launch, 1); },
                    concat("Rank 0 cannot listen at ", launch.address, ", port ", launch.port));
}

TEST_CASE("ranks: those that rank 0 starts share the cores unless the user has chosen OMP_NUM_THREADS") {
    for (const bool chosen : {false, true}) {
        const Body body = [&](ProcessGroup& ranks) {
            ranks.all_gather(1);
            if (omp_get_max_threads() != (chosen ? 7 : std::max(1, omp_get_num_procs() / RANKS)))
                throw Error("Threads are ", omp_get_max_threads(), ".");
        };
        Played(BY_RANK_0, body, {0, 1, 2}, 0, [&](int) {
            omp_set_num_threads(7);
            chosen ? setenv("OMP_NUM_THREADS", "7", 1) : unsetenv("OMP_NUM_THREADS");
        }).check({0, 0, 0}, "");
    }
}
