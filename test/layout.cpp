// layout.cpp - the sizes and the structure of the repository: limits of lines, and includes that run one way.
//
// A limit that is exceeded is no reason to raise it: something should become shorter first.
#include <set>

#include "help/files.h"

using namespace coat::test;

// The aims are 11,000 lines of core, 4,500 for the reading order of one step, and 8,500 of tests.
// Of DEV, 1,500 lines are the course: dev/coat.py, dev/exercises, dev/figures.py and what belongs to them. Of
// TESTS, 800 lines test it (test/dev).
constexpr size_t CORE = 11081, READING = 3940, TESTS = 8479, DEV = 5606, LARGEST_FILE = 1300, FUNCTION = 130;

static bool in(const std::string& f, const std::string& folder) { return f.rfind(folder, 0) == 0; }
static bool is_one_of(const std::string& f, const std::set<std::string>& extensions) {
    return extensions.count(fs::path(f).extension().string());
}
static bool is_source(const std::string& f) { return is_one_of(f, {".h", ".cpp", ".cu", ".cuh"}); }

// The files under version control; none where this is no git checkout.
static std::vector<std::string> tracked() {
    const Folder folder;
    if (std::system(("git ls-files 2>/dev/null > " + folder / "list").c_str()) != 0) return {};
    return lines_of(read_file(folder / "list"));
}

// The first line of each function that is longer than `limit`: from a line that ends with "{" to its "}".
static std::vector<std::string> long_functions(const std::vector<std::string>& lines, size_t limit) {
    std::vector<std::string> found;
    for (size_t i = 0; i < lines.size(); i++) {
        const size_t indent = lines[i].find_first_not_of(' ');
        if (lines[i].empty() || indent > 4 || lines[i].back() != '{' || !contains(lines[i], "(")) continue;
        size_t j = i + 1;
        while (j < lines.size() && lines[j].find('}') > indent) j++;
        if (j < lines.size() && j - i + 1 > limit) found.push_back(lines[i]);
    }
    return found;
}

TEST_CASE("layout: lines, columns, functions and entries at the top stay within their limits") {
    size_t core = 0, comments = 0, tests = 0, dev = 0;
    std::set<std::string> top;
    const std::vector<std::string> files = tracked();
    if (files.empty()) return;  // the sources without git
    for (const std::string& f : files) {
        if (f[0] != '.') top.insert(f.substr(0, f.find('/')));
        const std::vector<std::string> lines = lines_of(read_file(f));
        if (in(f, "dev/") && (is_source(f) || is_one_of(f, {".md", ".py", ".sh"}))) dev += lines.size();
        if (!is_source(f)) continue;
        INFO(f);
        if (in(f, "test/")) tests += lines.size();
        if (in(f, "test/") || in(f, "dev/")) continue;
        core += lines.size();
        CHECK(lines.size() <= LARGEST_FILE);
        for (const std::string& line : lines) {
            CHECK_MESSAGE(line.size() <= 110, line);
            const size_t first = line.find_first_not_of(' ');
            comments += first != std::string::npos && line.compare(first, 2, "//") == 0;
        }
        for (const std::string& function : long_functions(lines, FUNCTION)) CHECK_MESSAGE(false, function);
    }
    CHECK(core <= CORE);
    CHECK(comments * 100 <= core * 14);
    CHECK(tests <= TESTS);
    CHECK(dev <= DEV);
    CHECK(top.size() <= 16);
}

TEST_CASE("layout: the files of the reading order in the README have at most READING lines") {
    const std::string readme = read_file("README.md");
    const size_t start = readme.find("<!-- reading -->");
    REQUIRE(start != std::string::npos);
    const std::string rows = readme.substr(start, readme.find("\n\n", start + 20) - start);
    std::istringstream parts(rows);
    size_t total = 0, files = 0;
    for (std::string part; std::getline(parts, part, '`') && std::getline(parts, part, '`'); files++)
        total += lines_of(read_file(part)).size();
    CHECK(files >= 8);
    CHECK(total <= READING);
}

TEST_CASE("layout: includes run one way") {
    // A file includes files of its own level and of those below it.
    const std::vector<std::vector<std::string>> levels = {{"coat.h", "program/error.h"},
                                                          {"program/model.h", "program/ranks", "data/"},
                                                          {"program/plan", "program/flags"},
                                                          {"reference.", "gpu/", "coat.cu", "adamw.cu"},
                                                          {"model.cu"},
                                                          {"program/train.cpp"}};
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
            if (in(f, "reference.")) CHECK_MESSAGE(!in(path, "gpu/"), f << " includes " << path);
        }
    }
}
