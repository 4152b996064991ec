// commands.cpp - runs every command that the course, the manual and dev/README.md give, and compares what it
// prints with what the page quotes. The commands are found in the Markdown, so a new one is tested without being
// listed here.
#include <atomic>
#include <optional>
#include <regex>
#include <set>
#include <thread>

#include "../help/program.h"
#include "../help/random.h"

using namespace coat;
using namespace coat::test;

namespace {

// What a page says about commands, in its order.
struct Passage {
    enum Kind { Text, Command, Output } kind;
    std::string words;  // a paragraph, one command, or one line of output that is quoted
    int section;        // the number of the heading above it
};

}  // namespace

// A command is what begins with a program of this repository and is not its name alone.
static bool is_command(const std::string& text) {
    static const std::regex program(
        R"(^(\./setup|\./train .|make |python3 |build/\w|dev/\w+\.sh|hf |\w+=\S+ ))");
    return std::regex_search(text, program);
}

// Fenced code without a language has a command on each line; "```text" is output. In paragraphs, commands are
// spans of code.
static std::vector<Passage> passages(const std::string& page) {
    std::vector<Passage> found;
    std::string paragraph, fence;
    bool fenced = false;
    int section = 0;
    auto add = [&](Passage::Kind kind, std::string words) {
        while (!words.empty() && words.back() == ' ') words.pop_back();
        if (kind != Passage::Command || is_command(words)) found.push_back({kind, words, section});
    };
    auto end_paragraph = [&] {
        if (paragraph.empty()) return;
        add(Passage::Text, paragraph);
        const std::regex span("`([^`]+)`");
        for (std::sregex_iterator code(paragraph.begin(), paragraph.end(), span), end; code != end; ++code)
            add(Passage::Command, (*code)[1]);
        paragraph.clear();
    };
    for (const std::string& line : lines_of(page)) {
        if (line.rfind("```", 0) == 0) {
            end_paragraph();
            fenced = !fenced;
            fence = line.substr(3);
        } else if (fenced) {
            if (fence.empty()) add(Passage::Command, line.substr(0, line.find(" #")));
            if (fence == "text") add(Passage::Output, line);
        } else if (line.empty() || line[0] == '|' || line[0] == '#') {
            end_paragraph();
            if (line.rfind("## ", 0) == 0) section++;
            if (line[0] == '|') {  // a row of a table is a paragraph
                paragraph = line;
                end_paragraph();
            }
        } else {
            if (line.rfind("    ", 0) == 0 && is_command(line.substr(4)))
                add(Passage::Command, line.substr(4, line.find(" #") - 4));
            paragraph += (paragraph.empty() ? "" : " ") + line;
        }
    }
    end_paragraph();
    return found;
}

namespace {

// Commands that are not run, and why. Each row must still be on a page.
struct Skipped {
    const char *pattern, *why;
};

}  // namespace

const Skipped SKIPPED[] = {
    {R"(\./setup.*)", "installs packages from the network"},
    {R"(make bench)", "needs a GPU"},
    {R"((make )?build/ladder_.*)", "needs a GPU"},
    {R"(make (NVCC= O=build/cpu )?exercise N=1[34])",
     "needs a GPU, or a build of its own; exercises_on_cpu.cpp runs both"},
    {R"(dev/gpu\.sh.*)", "needs a GPU"},
    {R"(python3 dev/results\.py (?!help).*)", "needs a GPU, or writes into dev/"},
    {R"(make figures)", "needs matplotlib, and draws what lessons.py computes"},
    {R"(make NVCC= test)", "runs this test"},
    {R"(make NVCC= train && .*(NAME|my-recipe).*)", "needs a row that the reader adds to common/recipes.h"},
    {R"(python3 dev/plot\.py loss a\.jsonl.*)", "needs two logs; test/dev/plot.cpp draws some"},
    {R"(hf download .*)", "needs the network"},
    {R"(python3 data/tokenize\.py.*)", "needs a tokenizer from the network; test/data/tokenize.cpp has one"},
    {R"(\./train --model FOLDER.*)", "needs a model from the network"},
    {R"(\./train --(data|model|resume) (books|mine|tokens).*)", "needs text of the reader's own"},
    {R"(python3 data/chat\.py (tuned|mine-bpe))", "needs torch and transformers"},
};

static const Skipped* skipped(const std::string& command) {
    for (const Skipped& row : SKIPPED)
        if (std::regex_match(command, std::regex(row.pattern))) return &row;
    return nullptr;
}

namespace {

// How this program was built: then `make` in a command builds nothing else. The Makefile writes it into the
// file settings beside the program, as lines such as CXX=g++.
struct Build {
    std::string folder = fs::relative(fs::read_symlink("/proc/self/exe").parent_path()).string();
    std::vector<std::string> settings = lines_of(read_file(folder + "/settings"));
    std::string program = folder == "build" ? "train" : folder + "/train";

    // What `make` in a command calls: it builds as this program was built, not as a make above asks.
    std::string shell_function() const {
        std::string words = "'O=" + folder + "'";
        for (const std::string& setting : settings) words += " '" + setting + "'";
        return concat(R"(unset MAKEFLAGS MFLAGS MAKELEVEL
make() {
  local words=()
  for word; do
    [ "$word" = train ] && word=')",
                      program, R"('
    words+=("$word")
  done
  command make --no-print-directory )",
                      words, R"( "${words[@]}"
}
)");
    }
};

struct Result {
    int code = -1;
    std::string printed;
};

}  // namespace

// Runs all commands, two at a time, in the folder of the repository.
static std::map<std::string, Result> results_of(const std::vector<std::string>& commands) {
    const Folder folder;
    const Build build;
    const char* const path = std::getenv("COAT_TRAIN");
    const std::string program = fs::absolute(path ? path : "./train").string();
    std::vector<Result> results(commands.size());
    std::atomic<size_t> next = 0;
    auto work = [&] {
        for (size_t i; (i = next++) < commands.size();) {
            std::string command = commands[i];
            for (size_t at; (at = command.find("./train ")) != command.npos;)
                command.replace(at, 7, "\"$PROGRAM\"");
            // The small model is trained for 10 steps in place of 120.
            if (command == "python3 dev/lessons.py real")
                command = concat(
                    "\"$PROGRAM\" --device cpu --optimizer fp32 --steps 10 --batch 1 --eval-every 0 "
                    "--eval-tokens 2048 --sample-every 0 --out ",
                    folder / "small", " > ", folder / "log", " && ", command, " ", folder / "small");
            const std::string script = folder / concat(i, ".sh"), output = folder / concat(i, ".out");
            write_file(script, concat("export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 PROGRAM='", program,
                                      "'\n", build.shell_function(), command, "\n"));
            const int status = std::system(concat("timeout -k 5 300 env --default-signal=HUP,PIPE bash -e '",
                                                  script, "' > '", output, "' 2>&1")
                                               .c_str());
            results[i] = {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                          read_file(output)};
        }
    };
    std::thread other(work);
    work();
    other.join();
    std::map<std::string, Result> by_command;
    for (size_t i = 0; i < commands.size(); i++) by_command[commands[i]] = results[i];
    return by_command;
}

// A line as it looks on any machine: # for each number, such as -1.5e-05, and one space for several.
static std::string form_of(const std::string& line) {
    const std::string digits = "0123456789", signs = "+-";
    const auto is_at = [&](size_t i, const std::string& characters) {
        return i < line.size() && contains(characters, std::string(1, line[i]));
    };
    std::string form;
    for (size_t i = 0; i < line.size();) {
        const size_t number = is_at(i, signs) ? i + 1 : i;
        if (is_at(number, digits)) {
            i = line.find_first_not_of(digits + ".,", number);
            const size_t exponent = is_at(i, "e") && is_at(i + 1, signs) ? i + 2 : i + 1;
            if (is_at(i, "e") && is_at(exponent, digits)) i = line.find_first_not_of(digits, exponent);
            form += '#';
        } else if (line[i] == ' ') {
            i = line.find_first_not_of(' ', i);
            form += ' ';
        } else {
            form += line[i++];
        }
    }
    return form;
}

// The numbers in a line.
static std::vector<double> numbers_of(const std::string& line) {
    const std::regex number(R"([-+]?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?)");
    std::vector<double> found;
    const std::string plain = std::regex_replace(line, std::regex("([0-9]),([0-9])"), "$1$2");
    for (std::sregex_iterator at(plain.begin(), plain.end(), number), end; at != end; ++at)
        found.push_back(std::stod(at->str()));
    return found;
}

enum class Match { Exact, Near, Form };

// Near: numbers may be those of another machine, whose sums are rounded otherwise.
static bool matches(const std::string& line, const std::string& other, Match match) {
    if (match == Match::Exact) return line == other;
    if (form_of(line) != form_of(other)) return false;
    if (match == Match::Form) return true;
    const std::vector<double> a = numbers_of(line), b = numbers_of(other);
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](double x, double y) { return std::abs(x - y) <= 0.15 * std::abs(y) + 0.02; });
}

static bool has_line(const std::string& text, const std::string& line, Match match) {
    for (const std::string& other : lines_of(text))
        if (matches(line, other, match)) return true;
    return false;
}

// The number in "make exercise N=7".
static std::optional<int> exercise(const std::string& command) {
    std::smatch number;
    if (!std::regex_match(command, number, std::regex("make exercise N=([0-9]+)"))) return std::nullopt;
    return std::stoi(number[1]);
}

TEST_CASE("commands: all that the course and the manual give run and print what the pages quote" *
          doctest::skip(NO_NUMPY || quick())) {
    std::vector<std::string> commands;
    std::set<const Skipped*> used;
    const std::vector<std::string> pages = {"program/README.md", "dev/WALK.md", "dev/WALK2.md",
                                            "dev/README.md", "dev/exercises/README.md"};
    for (const std::string& page : pages)
        for (const Passage& p : passages(read_file(page))) {
            if (p.kind != Passage::Command) continue;
            if (const Skipped* row = skipped(p.words)) used.insert(row);
            else if (std::find(commands.begin(), commands.end(), p.words) == commands.end())
                commands.push_back(p.words);
        }
    for (const Skipped& row : SKIPPED)
        CHECK_MESSAGE(used.count(&row), std::string(row.pattern) << " is on no page");
    CHECK(commands.size() > 25);
    const std::map<std::string, Result> results = results_of(commands);
    for (const auto& [command, result] : results) {
        INFO(command << ":\n" << result.printed);
        const std::optional<int> number = exercise(command);
        // An exercise that is not solved yet ends with a line of the judge, and make with an error.
        const bool judged = number && contains(result.printed, concat("exercise ", *number, ": "));
        CHECK((result.code == 0 || (judged && result.code == 2)));
        if (number && !exercises_are_solved())
            CHECK(contains(result.printed, concat("exercise ", *number, ": nothing is computed yet")));
    }
    // Where numbers depend on the machine, the paragraph before the command or the table says that they "may
    // differ"; of three commands of lessons.py, the top of the course says so. Of the model that is trained
    // for 10 steps in place of 120, only the form of lines is compared.
    const auto match_of = [](const std::string& said, const std::string& command) {
        if (command == "python3 dev/lessons.py real") return Match::Form;
        const bool near =
            command == "python3 dev/lessons.py noise" || command == "python3 dev/lessons.py depth";
        return near || contains(said, "may differ") ? Match::Near : Match::Exact;
    };
    const std::string walk = read_file("dev/WALK.md") + read_file("dev/WALK2.md");
    for (const std::string& page : pages) {
        std::string printed, said;  // in this section; since the last command
        int section = -1;
        size_t quoted = 0;
        for (const Passage& p : passages(read_file(page))) {
            if (p.section != section) {
                section = p.section;
                printed.clear();
            }
            if (p.kind == Passage::Text) said = p.words;
            const auto result = results.find(p.words);
            if (p.kind == Passage::Command && result != results.end()) printed += result->second.printed;
            if (p.kind == Passage::Output) {
                quoted++;
                INFO(said << "\n" << printed);
                CHECK_MESSAGE(has_line(printed, p.words, match_of(said, "")), page << ": " << p.words);
            }
            // Every table of lessons.py is in the course.
            if (p.kind != Passage::Command || p.words.rfind("python3 dev/lessons.py", 0) != 0) continue;
            const Match match = match_of(said, p.words);
            if (result == results.end()) continue;
            for (const std::string& line : lines_of(result->second.printed))
                if (!line.empty()) CHECK_MESSAGE(has_line(walk, line, match), p.words << ": " << line);
        }
        if (page == "dev/WALK.md") CHECK(quoted >= 8);
    }
    // A table of the course whose head is printed has no other rows than those that are printed.
    std::string all;
    for (const auto& [command, result] : results)
        if (contains(command, "lessons.py")) all += result.printed;
    std::string head;
    for (const std::string& line : lines_of(walk)) {
        if (line[0] != '|') head.clear();
        else if (head.empty()) head = has_line(all, line, Match::Exact) ? line : "of the page alone";
        else if (head != "of the page alone") CHECK_MESSAGE(has_line(all, line, Match::Form), line);
    }
}

// Runs make in the repository, with a folder for what it builds.
static Ended make(const Folder& folder, const std::string& settings, const std::string& target) {
    return shell(folder, concat("unset MAKEFLAGS MFLAGS MAKELEVEL; make -C '", fs::current_path().string(),
                                "' 'O=", folder.path.string(), "' ", settings, " '", folder.path.string(),
                                "/", target, "'"));
}

TEST_CASE("make: without nvcc it says that a kernel takes it, although a build with nvcc left its object") {
    const Folder folder;
    write_file(folder / "coat.cu.o", "");
    const Ended ended = make(folder, "NVCC=", "coat.cu.o");
    CHECK(ended.code != 0);
    CHECK_MESSAGE(contains(ended.error, "coat.cu is for GPUs: to compile it takes nvcc"),
                  concat(ended.out, ended.error));
}

TEST_CASE("make: a program has the objects of the sources that there are now") {
    const Folder folder;
    for (const char* source :
         {"gpu/no_cuda.cpp", "gpu/recipe_on_gpu.cpp", "gpu/memory_layout.cpp", "gpu/extra_buffers.cpp",
          "dev/exercises/capstone.cpp", "test/kept.cpp", "test/deleted.cpp"})
        folder.write(source, "");
    folder.write("Makefile", read_file("Makefile"));
    // Instead of compiling and linking it writes its arguments to the file that follows -o.
    folder.write("compiler", R"(#!/bin/sh
for argument; do [ "$before" = -o ] && made=$argument; before=$argument; done
[ -z "$made" ] || echo "$@" > "$made"
)");
    fs::permissions(folder.path / "compiler", fs::perms::owner_all);
    const auto objects = [&] {
        const Ended ended =
            shell(folder, concat("unset MAKEFLAGS MFLAGS MAKELEVEL; make -C '", folder.path.string(),
                                 "' O=build NVCC= 'CXX=", folder / "compiler", "' build/tests"));
        REQUIRE_MESSAGE(ended.code == 0, ended.error);
        return read_file(folder.path / "build/tests");
    };
    CHECK(contains(objects(), "build/test/deleted.cpp.o"));
    fs::remove(folder.path / "test/deleted.cpp");
    CHECK(!contains(objects(), "deleted"));
    folder.write("test/added.cpp", "");
    CHECK(contains(objects(), "build/test/added.cpp.o"));
    CHECK(contains(objects(), "build/test/kept.cpp.o"));
}

TEST_CASE("make: an nvcc that is too old is refused in a sentence with the cure") {
    const Folder folder;
    for (const auto& [release, refused] : {std::pair{"12.8", true}, {"12.9", false}, {"13.0", false}}) {
        folder.write("nvcc", concat("#!/bin/sh\n[ $1 = --version ] && echo 'tools, release ", release, ", V",
                                    release, ".1' || echo compiled\n"));
        fs::permissions(folder.path / "nvcc", fs::perms::owner_all);
        const Ended ended = make(folder, "'NVCC=" + folder / "nvcc" + "'", "coat.cu.o");
        INFO(std::string(release), ended.out, ended.error);
        CHECK(contains(ended.error, "is of CUDA 12.8, and CUDA 12.9 or newer is needed.") == refused);
        CHECK(contains(ended.error, "make NVCC= train") == refused);
        CHECK(contains(ended.out, "compiled") == !refused);
    }
}
