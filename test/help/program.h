// program.h - runs ./train in a folder of its own, and checks what it prints, writes and returns. A test
// begins with a RunFolder; tiny(folder, flags) trains in it, and returns the exit code and what was printed.
#pragma once
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <vector>
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../data/checkpoint.h"
#include "../../data/files.h"
#include "model.h"

namespace coat::test {

// A folder with the file "text" to train on, large enough for the tiny runs below.
struct RunFolder : Folder {
    RunFolder() {
        std::string text;
        for (int i = 0; i < 1500; i++)
            text += concat("int f", i, "(int x) { return x * ", i * i % 97, "; }\n");
        write("text", text);
    }
};

// A model of 30,000 parameters, with which a run takes a fraction of a second. The head is a matrix of its
// own: then each gradient is one sum, which is the same for any number of ranks.
inline ModelConfig small_config() {
    return {.name = "small",
            .arch = LLAMA,
            .L = 2,
            .C = 32,
            .NH = 2,
            .NKV = 1,
            .F = 64,
            .V = 256,
            .max_T = 256,
            .tied = false};
}
inline const std::string& small_model() {
    static const Folder folder;
    static const std::string path = folder / "model";
    if (fs::create_directory(path))
        save_model_folder(path, *make_reference_model(settings_of("fp32", small_config(), 2, 16)), {});
    return path;
}

// What a program has left: its exit code, and what it wrote to standard output and standard error.
struct Ended {
    int code;
    std::string out, error;
};

// Runs a shell command in the folder, for at most five minutes. In it, `train` is the program, and `await
// TEST` waits until a test is true; it fails with exit code 79 when the process $pid ends before. The output
// is captured in files outside the folder. One thread: these runs are too small for more.
inline Ended shell(const Folder& folder, const std::string& command) {
    const char* const path = std::getenv("COAT_TRAIN");
    const std::string program = fs::absolute(path ? path : "./train").string(),
                      printed = folder.path.string() + "-printed";
    write_file(
        printed + ".sh",
        "cd '" + folder.path.string() + "'; export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 SMALL='" +
            small_model() + "' TRAIN='" + program + "'\nalias train='\"$TRAIN\"'\n" +
            "await() { until eval \"$1\"; do kill -0 $pid || exit 79; sleep 0.02; done; }\n" + command);
    // The program has the default signal handlers, even if the tests run under nohup.
    const int status = std::system(concat("timeout -k 5 300 env --default-signal=HUP,PIPE sh '", printed,
                                          ".sh' > '", printed, ".out' 2> '", printed, ".err'")
                                       .c_str());
    Ended ended{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(printed + ".out"),
                read_file(printed + ".err")};
    for (const char* end : {".sh", ".out", ".err"}) fs::remove(printed + end);
    return ended;
}

// Runs Python in the folder with these arguments. Programs can import the modules in dev/ and dev/ladders/;
// a warning is an error.
inline Ended python(const Folder& folder, const std::string& arguments) {
    const std::string dev = fs::absolute("dev").string();
    return shell(folder, "PYTHONPATH='" + dev + ":" + dev + "/ladders' python3 -W error " + arguments);
}
// Likewise these lines, as a program.
inline Ended python_lines(const Folder& folder, const std::string& lines) {
    folder.write("run.py", lines);
    return python(folder, "run.py");
}
#define PYTHON_TEST_CASE(name) TEST_CASE(name* doctest::skip(NO_PYTHON))
#define NUMPY_TEST_CASE(name) TEST_CASE(name* doctest::skip(NO_NUMPY))

// Flags of a run that takes a fraction of a second. Of a flag that is given twice the last value counts.
inline const std::string TINY =
    " --device cpu --model \"$SMALL\" --data text --batch 2 --seq 16 --lr 3e-3 --sample-every 0 "
    "--eval-tokens 640 ";
inline Ended train(const Folder& folder, const std::string& flags) { return shell(folder, "train " + flags); }
inline Ended tiny(const Folder& folder, const std::string& flags) { return train(folder, TINY + flags); }

inline void require_success(const Ended& ended) {
    INFO(ended.error);
    REQUIRE(ended.code == 0);
}

// A program that failed with exit code 1 and one line on stderr.
inline void check_failed(const Ended& ended, const std::string& who, const std::string& what = "") {
    CAPTURE(ended.error);
    CHECK(ended.code == 1);
    REQUIRE(ended.error.size() > 2);
    CHECK(ended.error.back() == '\n');
    check_error(ended.error.substr(0, ended.error.size() - 1), who, what);
}

// As above, of ./train, in one sentence. With a checkpoint, a second line says that it is the last one.
inline void check_one_sentence(Ended ended, const std::string& who, const std::string& checkpoint = "") {
    const std::string advice = "train: The last complete checkpoint is " + checkpoint + "; continue";
    const size_t at = ended.error.find(advice);
    if (!checkpoint.empty()) {
        CAPTURE(ended.error);
        REQUIRE((at != std::string::npos && ended.error.find('\n', at) + 1 == ended.error.size()));
        ended.error.resize(at);
    }
    check_failed(ended, who);
    CHECK(ended.error.compare(0, 7, "train: ") == 0);
    CHECK(!contains(ended.error, ". "));
}

// The flags are rejected in one sentence, and no file or folder is lost, changed or left behind.
inline void check_rejected(const Folder& folder, const std::string& flags, const std::string& who) {
    CAPTURE(flags);
    const auto before = everything_below(folder.path);
    check_one_sentence(train(folder, flags), who);
    CHECK(everything_below(folder.path) == before);
}

// The lines of one kind in the file "log" of the folder.
inline std::vector<nlohmann::json> logged(const Folder& folder, const std::string& kind) {
    std::vector<nlohmann::json> lines;
    for (const std::string& line : lines_of(read_file(folder.path / "log")))
        if (auto parsed = nlohmann::json::parse(line); parsed.at("kind") == kind) lines.push_back(parsed);
    return lines;
}

inline double number_after(const std::string& text, const std::string& words) {
    const size_t at = text.find(words);
    REQUIRE_MESSAGE(at != std::string::npos, "\"" << words << "\" is not in the output");
    return std::strtod(text.c_str() + at + words.size(), nullptr);
}

// The tensors of a checkpoint: two equal runs have the same.
inline std::string tensors_of(const fs::path& checkpoint) {
    for (const char* file : {"config.json", "model.safetensors", "optimizer.state", "trainer.json"})
        REQUIRE(fs::exists(checkpoint / file));
    return read_file(checkpoint / "model.safetensors") + read_file(checkpoint / "optimizer.state");
}
inline std::string last_checkpoint(const Folder& folder) {  // "out/step-000010"
    return fs::relative(find_checkpoint(folder / "out"), folder.path).string();
}
inline int64_t last_step(const Folder& folder) {
    return read_saved_run(find_checkpoint(folder / "out")).state.step;
}

// Runs ./train with these flags. When a line of its output contains `part` for the first time, the shell runs
// `action`, in which $pid is rank 0 and $others are the processes that it has started; both are empty if rank
// 0 has ended by then. $others must end within a minute after rank 0; else the exit code is 78. A run that
// hangs is killed after four minutes, so that its test fails.
inline Ended run_with_action(const Folder& folder, const std::string& flags, const std::string& part,
                             const std::string& action) {
    return shell(folder, concat(R"(
children() { echo $(cat /proc/$1/task/$1/children 2> /dev/null); }
mkfifo pipe
timeout -s KILL 240 "$TRAIN" )",
                                flags, R"( > pipe & limit=$!
acted=
while read -r line; do
    echo "$line"
    [ -z "$acted" ] || continue
    case $line in *')",
                                part, R"('*)
        acted=yes
        pid=$(children $limit)
        others=$(children $pid)
        )",
                                action, R"(;;
    esac
done < pipe
rm pipe
wait $limit; code=$?
for other in $others; do
    for attempt in $(seq 3000); do
        kill -0 $other 2> gone || break
        sleep 0.02
    done
    if kill -0 $other 2> gone; then exit 78; fi
done
exit $code)"));
}

inline sockaddr_in loopback(int port) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(uint16_t(port));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
}

// A socket that is bound to a port on which nothing listens. The kernel does not give such ports to others.
struct Bound {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port;
    Bound() {
        static int next = int(15000 + getpid() * 101LL % 13000);
        for (sockaddr_in at{};;) {
            at = loopback(port = next++);
            if (bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0) return;
            REQUIRE(next < 29000);
        }
    }
    ~Bound() { close(fd); }
};
inline int free_port() { return Bound().port; }

// Starts two ranks by hand; their output goes to out0 and out1. Two folders stand for two machines.
inline Ended two_by_hand(const Folder& folder, const std::string& flags0, const std::string& flags1,
                         const std::string& where0 = ".", const std::string& where1 = ".") {
    std::string ranks =
        concat("export COAT_PORT=", free_port(), " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 COAT_TOKEN=secret\n");
    for (const auto& [rank, where, flags] : {std::tuple{"0", where0, flags0}, {"1", where1, flags1}})
        ranks += concat("(cd ", where, "; RANK=", rank, " LOCAL_RANK=", where0 == "." ? rank : "0", " train ",
                        flags, ") > out", rank, " 2> err", rank, " & pid", rank, "=$!\n");
    return shell(folder, ranks +
                             "wait $pid1; other=$?; wait $pid0; code=$?; cat err0 err1 >&2\n"
                             "[ $code = $other ] || exit 77; exit $code");
}

}  // namespace coat::test
