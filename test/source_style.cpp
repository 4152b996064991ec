// source_style.cpp - what keeps the repository readable: no C++ or CUDA line, file or function is too long,
// includes run one way, and the reading order in the README counts its lines truly. How many lines there are
// in all, nobody counts.
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
        if (!is_source(f)) continue;
        INFO(f);
        const std::vector<std::string> lines = lines_of(read_file(f));
        CHECK(lines.size() <= LONGEST_FILE);
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

TEST_CASE("source style: the reading order in the README has the files' lines within a twentieth") {
    // The order is that of several tables. A row begins with the names of files, and their lines follow.
    size_t rows = 0;
    for (const std::string& row : lines_of(read_file("README.md"))) {
        std::smatch found;
        if (!std::regex_match(row, found, std::regex(R"(\| ((?:`[^`]+`(?:, )?)+) \| (\d+) \|.*)"))) continue;
        size_t lines = 0;
        std::istringstream names(found.str(1));
        for (std::string name; std::getline(names, name, '`') && std::getline(names, name, '`');)
            lines += lines_of(read_file(name)).size();
        const double difference = std::abs(std::stod(found.str(2)) - double(lines));
        CHECK_MESSAGE(difference <= 0.05 * double(lines) + 5, row << " has " << lines);
        rows++;
    }
    CHECK(rows >= 20);
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
        if (!is_source(f) || in(f, "test/") || in(f, "dev/")) continue;
        const std::string folder = f.find('/') == std::string::npos ? "" : f.substr(0, f.find('/') + 1);
        for (const std::string& line : lines_of(read_file(f))) {
            if (line.rfind("#include \"", 0) != 0) continue;
            std::string path = line.substr(10, line.rfind('"') - 10);
            path = in(path, "../") ? path.substr(3) : folder + path;
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
