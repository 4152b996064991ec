// test_ranks.cpp - ranks find each other, exchange bytes, and end together in one sentence.
//
// Where no rank fails, the ranks are threads of this process. Faults need processes: the test starts this
// program again, with COAT_TEST_ROLE in its environment.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <thread>
#include <fcntl.h>

#include "../ranks.h"
#include "files.h"
#include "ports.h"

using namespace coat;
using namespace coat::test;

namespace {

// Exactly these variables of launchers are set; the others are restored afterwards.
struct Environment {
    using Values = std::map<std::string, std::string>;
    std::map<std::string, std::optional<std::string>> before;
    explicit Environment(const Values& values) {
        for (const char* name :
             {"COAT_RANK", "COAT_RANKS", "COAT_LOCAL_RANK", "COAT_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
              "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
              "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "SLURM_PROCID",
              "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}) {
            if (const char* text = std::getenv(name)) before[name] = text;
            else before[name] = std::nullopt;
            unsetenv(name);
        }
        for (const auto& [name, value] : values) setenv(name.c_str(), value.c_str(), 1);
    }
    ~Environment() {
        for (const auto& [name, value] : before)
            if (value) setenv(name.c_str(), value->c_str(), 1);
            else unsetenv(name.c_str());
    }
};

Launch launch_of(const Environment::Values& values, int64_t ranks_flag = 0) {
    const Environment environment(values);
    return find_launch(ranks_flag);
}

void check_launch(const Launch& launch, int rank, int ranks, int local, const std::string& address,
                  int port) {
    CHECK(launch.rank == rank);
    CHECK(launch.ranks == ranks);
    CHECK(launch.local == local);
    CHECK(launch.address == address);
    CHECK(launch.port == port);
}

// Runs `body` with each of several ranks, in threads.
void with_ranks(int count, const std::function<void(ProcessGroup&)>& body, int late_ms = 0) {
    const int port = free_port();
    std::vector<std::thread> threads;
    std::atomic<int> done{0};
    for (int rank = 0; rank < count; rank++)
        threads.emplace_back([&, rank] {
            // Rank 0 is late if late_ms < 0, the last rank if late_ms > 0.
            if (rank == (late_ms < 0 ? 0 : count - 1))
                std::this_thread::sleep_for(std::chrono::milliseconds(std::abs(late_ms)));
            ProcessGroup ranks({rank, count, rank, "127.0.0.1", port}, nullptr, 20);
            body(ranks);
            done++;
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(done == count);
}

// What rank `from` sends to rank `to`: 0 bytes, a few, or 30 MB.
Bytes parcel(int from, int to) {
    const size_t size = from == 1 && to == 0 ? 30'000'000 : static_cast<size_t>((from + 2 * to) % 3 * 5);
    return Bytes(size, static_cast<uint8_t>(16 * from + to + 1));
}

const std::string FAULTS =
    "ProcessGroup: a failing process ends all within seconds and the user sees one sentence";

// A rank in a process of its own. role: what happens on which rank, e.g. "kill 1".
int play(const std::string& role) {
    std::string program = fs::read_symlink("/proc/self/exe"), filter = "--test-case=" + FAULTS;
    char* argv[] = {program.data(), filter.data(), nullptr};
    const bool started = std::getenv("COAT_RANK") != nullptr;
    Launch launch = started ? find_launch(3) : Launch{0, 3, 0, "127.0.0.1", 0};
    const std::string what = role.substr(0, role.find(' ')), who = role.substr(role.find(' ') + 1);
    const bool mine = who == "all" || who == std::to_string(launch.rank);
    const std::string sentence = "The disk is full; free some space.";
    dup2(open(std::getenv("COAT_TEST_ERRORS"), O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
    try {
        if (what == "count" && mine) launch.ranks = 4;
        if (what == "early" && mine) throw Error(sentence);
        if (what == "vanish" && mine) raise(SIGKILL);
        ProcessGroup ranks(launch, argv, what == "absent" ? 2 : 20);
        const std::vector<int> gathered = ranks.all_gather(launch.rank);
        if (gathered != std::vector<int>{0, 1, 2}) return 7;
        if (what == "fail" && mine) ranks.fail(sentence);
        if (what == "throw" && mine) throw Error(sentence);
        if (what == "kill" && mine) raise(SIGKILL);
        if (what == "exit" && mine) _exit(1);
        if (what == "compute") {  // the others wait for nothing
            if (launch.rank == 1) raise(SIGKILL);
            std::this_thread::sleep_for(std::chrono::seconds(60));
        }
        while (what != "end") ranks.all_gather(Bytes(100'000));
        return 0;
    } catch (const Error& error) {
        std::fprintf(stderr, "train: %s\n", error.what());
        return 1;
    }
}

// Three processes: started here one by one, or by rank 0. Their exit codes, and what they print on stderr.
struct Played {
    std::string codes, error;
    Played(const std::string& role, bool by_rank_0, const std::string& ranks = "0 1 2") {
        const Folder folder;
        const Environment environment({});
        const std::string self = "COAT_TEST_ROLE='" + role + "' COAT_TEST_ERRORS='" + (folder / "error") +
                                 "' OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= '" +
                                 fs::read_symlink("/proc/self/exe").string() + "' --test-case='" + FAULTS +
                                 "' 9>&1 >/dev/null";
        const std::string port = " COAT_PORT=" + std::to_string(free_port()) + " ";
        const std::string each = "for r in " + ranks + "; do (COAT_RANK=$r COAT_RANKS=3" + port + self +
                                 "; echo $? >'" + (folder / "exit") + "'$r) & done; wait; cat '" +
                                 (folder / "exit") + "'*";
        // The shell reports killed processes on stderr, too. cat waits until every process has closed file 9.
        const std::string all = "{ " + (by_rank_0 ? self + "; echo $?" : each) +
                                "; } 2>/dev/null | cat >'" + (folder / "codes") + "'";
        const auto start = std::chrono::steady_clock::now();
        CHECK(std::system(all.c_str()) == 0);
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
        CHECK(passed.count() < 5);
        codes = read_file(folder / "codes");
        std::replace(codes.begin(), codes.end(), '\n', ' ');
        error = read_file(folder / "error");
    }
};

}  // namespace

TEST_CASE("find_launch: torchrun, mpirun, srun and COAT_RANK say which rank this process is") {
    check_launch(launch_of({}), 0, 1, 0, "", 0);
    check_launch(launch_of({{"COAT_RANK", "1"}, {"COAT_RANKS", "2"}, {"COAT_LOCAL_RANK", "1"}}), 1, 2, 1,
                 "127.0.0.1", 29600);
    const Environment::Values torchrun = {{"RANK", "5"},       {"WORLD_SIZE", "8"},     {"LOCAL_RANK", "1"},
                                          {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}};
    check_launch(launch_of(torchrun), 5, 8, 1, "node0", 29501);  // torchrun itself listens on MASTER_PORT
    check_launch(launch_of(torchrun, 8), 5, 8, 1, "node0", 29501);
    check_launch(launch_of({{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}, {"COAT_PORT", "4000"}}),
                 2, 4, 2, "127.0.0.1", 4000);
    check_launch(launch_of({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}}), 0, 2, 0,
                 "127.0.0.1", 29600);
    const Environment::Values srun = {{"SLURM_PROCID", "3"},         {"SLURM_NTASKS", "4"},
                                      {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "1"},
                                      {"MASTER_ADDR", "node0"}};
    check_launch(launch_of(srun), 3, 4, 1, "node0", 29600);
    Environment::Values pmi = srun;
    pmi["PMI_RANK"] = "3", pmi["PMI_SIZE"] = "4";
    check_launch(launch_of(pmi), 3, 4, 1, "node0", 29600);
}

TEST_CASE("find_launch: --ranks starts processes where no launcher has started several") {
    check_launch(launch_of({}, 4), 0, 4, 0, "127.0.0.1", 0);
    check_launch(launch_of({}, 1), 0, 1, 0, "", 0);
    const Environment::Values batch = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}};
    check_launch(launch_of(batch), 0, 1, 0, "", 0);
    check_launch(launch_of(batch, 4), 0, 4, 0, "127.0.0.1", 0);
    check_launch(launch_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, 2), 0, 2, 0, "127.0.0.1", 0);
}

TEST_CASE("find_launch: a wrong variable is named in the error") {
    auto rejected = [](const Environment::Values& values, const std::string& who, int64_t flag = 0) {
        check_error([&] { launch_of(values, flag); }, who);
    };
    rejected({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK is \"2\"; set it to a whole number from 0 to 1");
    rejected({{"RANK", "x"}, {"WORLD_SIZE", "2"}}, "RANK is \"x\"");
    rejected({{"RANK", "0"}, {"WORLD_SIZE", "2000"}}, "WORLD_SIZE");
    rejected({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE");
    rejected({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"COAT_PORT", "70000"}}, "COAT_PORT");
    rejected({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "65535"}}, "MASTER_PORT");
    rejected({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}}, "set MASTER_ADDR");
    rejected({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "--ranks 4 contradicts WORLD_SIZE=2", 4);
    rejected({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "--ranks 1 contradicts WORLD_SIZE=2", 1);
}

TEST_CASE("ProcessGroup: exchange() delivers bytes of any size between 1, 2, 3 and 4 ranks") {
    for (int count = 1; count <= 4; count++)
        with_ranks(count, [&](ProcessGroup& ranks) {
            std::vector<Bytes> to;
            for (int p = 0; p < count; p++) to.push_back(parcel(ranks.rank(), p));
            const std::vector<Bytes> from = ranks.exchange(to);
            REQUIRE(from.size() == to.size());
            for (int p = 0; p < count; p++) CHECK((from[size_t(p)] == parcel(p, ranks.rank())));
        });
}

TEST_CASE("ProcessGroup: all_gather() gives every rank the values of all, 2000 times in a row") {
    with_ranks(3, [](ProcessGroup& ranks) {
        int wrong = 0;
        for (int64_t i = 0; i < 2000; i++)
            wrong += ranks.all_gather(i + ranks.rank()) != std::vector<int64_t>{i, i + 1, i + 2};
        CHECK(wrong == 0);
        CHECK(ranks.all_gather(Bytes(size_t(ranks.rank()), 7)) == std::vector<Bytes>{{}, {7}, {7, 7}});
        CHECK_THROWS_AS(ranks.exchange({}), std::logic_error);
    });
}

TEST_CASE("ProcessGroup: a rank may be late") {
    for (const int late_ms : {-300, 300})
        with_ranks(
            3, [](ProcessGroup& ranks) { CHECK(ranks.all_gather(1) == std::vector<int>(3, 1)); }, late_ms);
}

TEST_CASE("ProcessGroup: a connection of another program is ignored") {
    const int port = free_port();
    std::thread rank_0([&] { CHECK(ProcessGroup({0, 2, 0, "127.0.0.1", port}, nullptr, 20).count() == 2); });
    const sockaddr_in at = loopback(port);
    const std::string text = "GET / HTTP/1.1\r\n\r\n";
    std::vector<int> foreign;
    for (const size_t size : {text.size(), size_t(3), size_t(0)}) {  // one says nothing, and stays
        foreign.push_back(socket(AF_INET, SOCK_STREAM, 0));
        while (connect(foreign.back(), reinterpret_cast<const sockaddr*>(&at), sizeof(at)) != 0) usleep(1000);
        CHECK(send(foreign.back(), text.data(), size, MSG_NOSIGNAL) == ssize_t(size));
    }
    CHECK(ProcessGroup({1, 2, 1, "127.0.0.1", port}, nullptr, 20).count() == 2);
    rank_0.join();
    for (const int fd : foreign) close(fd);
}

TEST_CASE("ProcessGroup: a port in use, a missing rank 0 and a missing rank are errors") {
    const Bound bound;
    const Launch rank_0{0, 2, 0, "127.0.0.1", bound.port}, rank_1{1, 2, 1, "127.0.0.1", bound.port};
    check_error([&] { ProcessGroup(rank_1, nullptr, 0.3); },
                "Rank 1 cannot connect with rank 0 at 127.0.0.1, port");
    listen(bound.fd, 1);
    check_error([&] { ProcessGroup(rank_0, nullptr, 1); },
                "Port " + std::to_string(bound.port) + " is in use");
    const auto start = std::chrono::steady_clock::now();
    check_error([&] { ProcessGroup({0, 3, 0, "127.0.0.1", free_port()}, nullptr, 1); },
                "(1, 2)", "COAT_PORT");
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(3));
}

TEST_CASE("ProcessGroup: a port that this user may not open is an error that names COAT_PORT") {
    int first_free = 0;  // root may open all of them, so it becomes another user for a moment
    std::ifstream("/proc/sys/net/ipv4/ip_unprivileged_port_start") >> first_free;
    const uid_t user = geteuid();
    if (first_free < 2 || (user == 0 && seteuid(65534) != 0)) {
        MESSAGE("Every user may open every port here, so this is not tested.");
        return;
    }
    check_error([] { ProcessGroup({0, 2, 0, "127.0.0.1", 1}, nullptr, 1); },
                "Permission denied", "COAT_PORT");
    CHECK(seteuid(user) == 0);
}

TEST_CASE(FAULTS.c_str()) {
    if (const char* role = std::getenv("COAT_TEST_ROLE")) _exit(play(role));
    const std::string full = "The disk is full; free some space.\n", ended = " has ended unexpectedly";
    // codes: of ranks that are started one by one. Where rank 0 starts the others, only its own is known.
    auto check = [&](bool by_rank_0, const std::string& role, const std::string& codes,
                     const std::string& sentence, const std::string& ranks = "0 1 2") {
        const Played played(role, by_rank_0, ranks);
        CAPTURE(role);
        CAPTURE(by_rank_0);
        CAPTURE(played.error);
        CHECK(played.codes == (by_rank_0 ? codes.substr(0, codes.find(' ') + 1) : codes));
        if (sentence != "ANY") CHECK(contains(played.error, "train: " + sentence) == !sentence.empty());
        CHECK(std::count(played.error.begin(), played.error.end(), '\n') == (sentence.empty() ? 0 : 1));
    };
    for (const bool by_rank_0 : {true, false}) {
        check(by_rank_0, "end", "0 0 0 ", "");
        check(by_rank_0, "fail 0", "1 1 1 ", full);
        check(by_rank_0, "fail 2", "1 1 1 ", "Rank 2: " + full);
        check(by_rank_0, "fail all", "1 1 1 ", "ANY");
        check(by_rank_0, "throw 0", "1 1 1 ", full);
        check(by_rank_0, "throw 1", "1 1 1 ", full);
        check(by_rank_0, "exit 1", "1 1 1 ", "Rank 1" + ended);
        check(by_rank_0, "kill 0", "137 1 1 ", "Rank 0" + ended);
        check(by_rank_0, "kill 2", "1 1 137 ", "Rank 2" + ended);
        check(by_rank_0, "compute", "1 137 1 ", "Rank 1" + ended);
    }
    // Before all have connected.
    check(true, "early 1", "1 ", full);
    check(true, "vanish 1", "1 ", "Rank 1 has ended before it connected with rank 0 (wait status 9)");
    check(false, "absent", "1 1 ", "Some ranks of 3 have not connected in time (2)", "0 1");
    check(false, "end", "1 1 ", "Rank 1 has connected twice: two runs use port", "0 1 1");
    check(false, "count 1", "1 1 ", "Rank 1 of 4 has connected with rank 0 of 3;", "0 1");
}
