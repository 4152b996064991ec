// source_style.cpp - what keeps the repository readable: no C++ or CUDA line, file or function is too long,
// includes run one way, and the reading order in the README counts its lines truly. How many lines there are
// in all, nobody counts.
#include <map>
#include <regex>
#include <set>

#include "help/files.h"

using namespace coat::test;

constexpr size_t MOST_COLUMNS = 110, LONGEST_FILE = 1300, LONGEST_FUNCTION = 80;

static bool in(const std::string& f, const std::string& folder) { return f.rfind(folder, 0) == 0; }
static bool is_one_of(const std::string& f, const std::set<std::string>& extensions) {
    return extensions.count(fs::path(f).extension().string());
}
static bool is_source(const std::string& f) { return is_one_of(f, {".h", ".cpp", ".cu", ".cuh"}); }

// The files under version control. Sources without git have none: there the tests that need them are skipped.
static std::vector<std::string> tracked() {
    const Folder folder;
    REQUIRE(std::system(("git ls-files > " + folder / "list").c_str()) == 0);
    return lines_of(read_file(folder / "list"));
}
static const bool NO_GIT = std::system("git ls-files --error-unmatch README.md >/dev/null 2>&1") != 0;
#define GIT_TEST_CASE(name) TEST_CASE("source style: " name* doctest::skip(NO_GIT))

static bool is_any_of(const char* characters, char c) { return contains(characters, std::string(1, c)); }

// The line without the comment that follows its code.
static std::string code_of(const std::string& line) {
    const size_t first = line.find_first_not_of(' ');
    const size_t comment = first == line.npos ? line.npos : line.find("  //", first);
    return line.substr(0, line.find_last_not_of(' ', comment) + 1);
}

// The first line of each function, or block in one, that is longer than `limit`, from its signature to its
// "}". A signature may take several lines; the last one ends with "{", after which a comment may follow.
static std::vector<std::string> long_functions(std::vector<std::string> lines, size_t limit) {
    for (std::string& line : lines) line = code_of(line);
    std::vector<std::string> found;
    for (size_t first = 0; first < lines.size(); first++) {
        const size_t indent = lines[first].find_first_not_of(' ');
        if (!contains(lines[first], "(") || is_any_of("/#}", lines[first][indent])) continue;
        size_t brace = first;
        while (brace < lines.size() && !lines[brace].empty() && !is_any_of("{;}:", lines[brace].back()))
            brace++;
        if (brace == lines.size() || !lines[brace].ends_with('{')) continue;
        size_t last = brace + 1;
        while (last < lines.size() && lines[last].find('}') > indent) last++;
        if (last < lines.size() && last - first + 1 > limit) found.push_back(lines[first]);
    }
    return found;
}

TEST_CASE("source style: a function that is too long is found however its signature ends") {
    const std::vector<std::string> rest = {"    a();", "    b();", "}"};
    const auto found = [&](std::vector<std::string> lines, size_t limit) {
        lines.insert(lines.end(), rest.begin(), rest.end());
        return !long_functions(lines, limit).empty();
    };
    for (const std::vector<std::string>& signature : std::vector<std::vector<std::string>>{
             {"void f() {"},
             {"void f() {  // a comment"},
             {"void f(int x,", "       int y) {"},
             {"void f(int x,  // a comment", "       int y) {  // another; with signs {"},
             {"template <class T> T f() const {"}}) {
        CAPTURE(signature.back());
        CHECK(found(signature, signature.size() + 2));
        CHECK(!found(signature, signature.size() + 3));
    }
    CHECK(!found({"void f();", "struct S {"}, 1));
    CHECK(!found({"// void f() {"}, 1));
}

GIT_TEST_CASE("lines and files and functions of C++ and CUDA stay within their limits") {
    for (const std::string& f : tracked()) {
        if (!is_source(f) && !is_one_of(f, {".py"})) continue;
        INFO(f);
        const std::vector<std::string> lines = lines_of(read_file(f));
        CHECK(lines.size() <= LONGEST_FILE);
        if (!is_source(f)) continue;
        for (const std::string& function : long_functions(lines, LONGEST_FUNCTION))
            CHECK_MESSAGE(false, function);
        if (in(f, "test/")) continue;  // tests have programs and pages in strings
        for (const std::string& line : lines) CHECK_MESSAGE(line.size() <= MOST_COLUMNS, line);
    }
}

// Another version of clang-format breaks some lines at other places. Whoever solves the exercises may format
// them in another way.
static const bool NO_FORMATTER =
    std::system("clang-format --version 2>/dev/null | grep -q 'version 14[.]'") != 0;
TEST_CASE("source style: files are as clang-format writes them" * doctest::skip(NO_GIT || NO_FORMATTER)) {
    const Folder folder;
    const std::string wrong = folder / "wrong";
    const std::string files = "git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' ':!dev/exercises/[0-9]*'";
    const std::string check = " | xargs -P 4 -n 20 clang-format --dry-run --Werror 2> '" + wrong + "'";
    const int code = std::system((files + check).c_str());
    CHECK_MESSAGE(code == 0, "clang-format -i FILE mends these: " << read_file(wrong));
}

// The names between the backquotes of a cell of a table.
static std::vector<std::string> names_in(const std::string& cell) {
    std::vector<std::string> names;
    std::istringstream text(cell);
    for (std::string name; std::getline(text, name, '`') && std::getline(text, name, '`');)
        names.push_back(name);
    return names;
}

// A row of the three tables of the README that give the reading order. It begins with the names of files, and
// their lines follow.
struct ReadingRow {
    std::vector<std::string> files;
    double lines;
};
static std::vector<ReadingRow> reading_order() {
    std::vector<ReadingRow> rows;
    const std::regex pattern(R"(\| ((?:`[^`]+`(?:, )?)+) \| (\d+) \|.*)");
    bool in_table = false;
    for (const std::string& line : lines_of(read_file("README.md"))) {
        if (in(line, "| file | lines |")) in_table = true;
        if (!in(line, "|")) in_table = false;
        if (!in_table || !in(line, "| `")) continue;
        std::smatch found;
        REQUIRE_MESSAGE(std::regex_match(line, found, pattern), line);
        rows.push_back({.files = names_in(found.str(1)), .lines = std::stod(found.str(2))});
    }
    return rows;
}

// The headers of the table of the README that names what is included, but need not be read.
static std::set<std::string> headers_in_no_reading_order() {
    std::set<std::string> headers;
    bool in_table = false;
    for (const std::string& line : lines_of(read_file("README.md"))) {
        if (in(line, "| header |")) in_table = true;
        if (!in(line, "|")) in_table = false;
        if (!in_table) continue;
        for (const std::string& name : names_in(line.substr(0, line.find('|', 1)))) headers.insert(name);
    }
    return headers;
}

TEST_CASE("source style: the reading order in the README has the files' lines within a twentieth") {
    const std::vector<ReadingRow> rows = reading_order();
    for (const ReadingRow& row : rows) {
        size_t lines = 0;
        for (const std::string& name : row.files) lines += lines_of(read_file(name)).size();
        const double difference = std::abs(row.lines - double(lines));
        CHECK_MESSAGE(difference <= 0.05 * double(lines) + 5, row.files[0] << " has " << lines);
    }
    CHECK(rows.size() >= 20);
}

// The files of this repository that a file includes.
static std::vector<std::string> includes_of(const std::string& f) {
    std::vector<std::string> included;
    const std::regex pattern(R"re(\s*#\s*include\s*"([^"]+)".*)re");
    for (const std::string& line : lines_of(read_file(f))) {
        std::smatch found;
        if (line.find('#') == line.npos || !std::regex_match(line, found, pattern)) continue;
        included.push_back((fs::path(f).parent_path() / found.str(1)).lexically_normal().string());
    }
    return included;
}

TEST_CASE("source style: an include is found however it is spaced") {
    const Folder folder;
    write_file(folder / "a.h", "#include <map>\n#include \"b.h\"\n #  include \"../c.h\"  // a comment\n");
    const fs::path here = folder / "";
    CHECK(includes_of(folder / "a.h") ==
          std::vector<std::string>{here / "b.h", (here / "../c.h").lexically_normal()});
}

TEST_CASE("source style: a file in the README's reading order includes only what stands above it") {
    std::set<std::string> allowed = headers_in_no_reading_order();
    CHECK(allowed.count("common/text.h"));
    for (const ReadingRow& row : reading_order()) {
        allowed.insert(row.files.begin(), row.files.end());
        for (const std::string& f : row.files)
            for (const std::string& included : includes_of(f))
                CHECK_MESSAGE(allowed.count(included), f << " includes " << included);
    }
}

// By file, the files that it includes.
using Includes = std::map<std::string, std::vector<std::string>>;

// The files of a cycle to which the includes of f lead, or none. `path` are the files that led to f, and
// `without_cycle` those of which it is known that they lead to no cycle.
static std::vector<std::string> cycle_from(const std::string& f, const Includes& includes,
                                           std::vector<std::string> path,
                                           std::set<std::string>& without_cycle) {
    if (without_cycle.count(f) || !includes.count(f)) return {};
    const auto before = std::find(path.begin(), path.end(), f);
    if (before != path.end()) return {before, path.end()};
    path.push_back(f);
    for (const std::string& included : includes.at(f)) {
        const std::vector<std::string> cycle = cycle_from(included, includes, path, without_cycle);
        if (!cycle.empty()) return cycle;
    }
    without_cycle.insert(f);
    return {};
}

TEST_CASE("source style: a cycle of includes is found") {
    using Files = std::vector<std::string>;
    Includes includes = {{"a", {"c"}}, {"b", {"c", "d"}}, {"c", {"d"}}, {"d", {"elsewhere"}}};
    const auto cycle = [&] {
        std::set<std::string> without_cycle;
        CHECK(cycle_from("a", includes, {}, without_cycle).empty());
        return cycle_from("b", includes, {}, without_cycle);
    };
    CHECK(cycle().empty());
    includes["b"].push_back("e");
    includes["e"] = {"c", "b"};
    CHECK(cycle() == Files{"b", "e"});
}

GIT_TEST_CASE("includes have no cycle") {
    Includes includes;
    for (const std::string& f : tracked())
        if (is_source(f)) includes[f] = includes_of(f);
    std::set<std::string> without_cycle;
    for (const auto& [f, included] : includes) {
        std::string text;
        for (const std::string& file : cycle_from(f, includes, {}, without_cycle)) text += file + " ";
        CHECK_MESSAGE(text.empty(), "a cycle of includes: " << text);
    }
}

GIT_TEST_CASE("includes run one way") {
    // A file includes files of its own level and of those below it.
    const std::vector<std::vector<std::string>> levels = {
        {"common/formats.h", "common/text.h"},
        {"common/recipes.h", "common/random.h", "common/step.h"},
        {"common/architecture.h", "common/quant_errors.h"},
        {"common/known_models.h"},
        {"common/model.h"},
        {"common/ranks.h", "common/state_tensors.h", "data/"},
        {"gpu/memory_layout", "gpu/extra_buffers", "gpu/gpu_model", "gpu/recipe_on_gpu"},
        {"reference/", "gpu/", "coat.", "adamw."},
        {"model.cu"},
        {"program/"}};
    auto level = [&](const std::string& f) {
        for (size_t i = 0; i < levels.size(); i++)
            for (const std::string& name : levels[i])
                if (in(f, name)) return int(i);
        FAIL("a file that no level names: " << f);
        return 0;
    };
    for (const std::string& f : tracked()) {
        if (!is_source(f) || in(f, "test/")) continue;
        for (const std::string& path : includes_of(f)) {
            CHECK_MESSAGE(!in(path, "test/"), f << " includes " << path);
            if (in(f, "dev/")) continue;  // it may include all of the program
            CHECK_MESSAGE(level(path) <= level(f), f << " includes " << path);
            // The two models check each other, so neither includes files of the other (common/model.h).
            if (in(f, "reference/")) CHECK_MESSAGE(!in(path, "gpu/"), f << " includes " << path);
            else if (!in(f, "program/") && f != "gpu/quant_report.cu")
                CHECK_MESSAGE(!in(path, "reference/"), f << " includes " << path);
        }
    }
}

GIT_TEST_CASE("every run of the tests draws the same inputs") {
    for (const std::string& f : tracked()) {
        if (!in(f, "test/") || f == "test/source_style.cpp") continue;
        for (const char* source : {"random_device", "time(nullptr)", "system_clock"})
            CHECK_MESSAGE(!contains(read_file(f), source), f << " draws from " << std::string(source));
    }
}
