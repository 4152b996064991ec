// pages.cpp - what the pages say is so: quotations and names of tests in the course (WALK.md and WALK2.md),
// tables of README.md and program/README.md, links.
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "../../program/plan.h"
#include "../help/files.h"

using namespace coat;
using namespace coat::test;

// The lines of a text, without what they are indented by, and without empty ones.
static std::string flat(const std::string& text) {
    return std::regex_replace("\n" + text + "\n", std::regex("\n\\s*"), "\n");
}

static std::string course() { return read_file("dev/WALK.md") + read_file("dev/WALK2.md"); }

TEST_CASE("WALK.md: every quoted line is in its file in the same order") {
    std::string source, quoted;  // the file; lines of it that follow each other
    size_t at = 0, quotations = 0;
    for (const std::string& line : lines_of(course())) {
        const bool fence = line.rfind("```", 0) == 0;
        if (!fence && flat(line) != "\n// ...\n") {
            if (!source.empty()) quoted += line + "\n";
            continue;
        }
        if (!quoted.empty()) {
            CAPTURE(quoted);
            at = source.find(flat(quoted), at);
            REQUIRE(at != source.npos);
            at++;
            quotations++;
            quoted.clear();
        }
        if (fence) at = 0, source = line.rfind("```cpp ", 0) == 0 ? flat(read_file(line.substr(7))) : "";
    }
    CHECK(quotations >= 2);
}

// The anchors that GitHub gives to the headings of a page: in lower case, with "-" for spaces, and without
// punctuation.
static std::set<std::string> anchors(const std::string& page) {
    std::set<std::string> found;
    for (const std::string& line : lines_of(page)) {
        if (!std::regex_search(line, std::regex("^#+ "))) continue;
        std::string anchor;
        for (const char c : line.substr(line.find(' ') + 1)) {
            if (std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_')
                anchor += char(std::tolower(c));
            if (c == ' ') anchor += '-';
        }
        found.insert(anchor);
    }
    return found;
}

TEST_CASE("pages: every link to a file and to a heading and every picture is there") {
    const std::regex target("(?:\\]\\(|srcset=\"|src=\"|href=\")([^)\"#:]*)(?:#([^)\"]*))?[)\"]");
    for (const char* page :
         {"README.md", "program/README.md", "test/README.md", "dev/README.md", "dev/WALK.md", "dev/WALK2.md",
          "dev/RESULTS.md", "dev/exercises/README.md", "dev/ladders/README.md", "dev/explore.html"}) {
        const std::string text = std::regex_replace(read_file(page), std::regex("`[^`\n]*`"), "");
        for (std::sregex_iterator found(text.begin(), text.end(), target), end; found != end; ++found) {
            const std::string path = (*found)[1], heading = (*found)[2];
            const fs::path file = path.empty() ? fs::path(page) : fs::path(page).parent_path() / path;
            CHECK_MESSAGE(fs::exists(file), page << " names " << file);
            if (!heading.empty() && fs::exists(file))
                CHECK_MESSAGE(anchors(read_file(file)).count(heading),
                              page << " names " << file << "#" << heading);
        }
    }
}

// What is wrong with a page of this width after its scripts have run and every control has been used, or
// "opened: ": a script that is added reports it. checks: lines of this script, which are for one page. No
// window of chromium is narrower than 500 pixels, but a frame may be.
static std::string opened_in_browser(const std::string& page, int width, const std::string& checks = "") {
    const Folder folder;
    const std::string report = R"(<script>
const wrong = [];
const moved = control => ["input", "change"].forEach(kind => control.dispatchEvent(new Event(kind, {bubbles: true})));
addEventListener("error", event => wrong.push("error: " + event.message));
addEventListener("load", () => setTimeout(() => {
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("wider than the window");
  for (const link of document.querySelectorAll('a[href^="#"]'))
    if (link.hash.length > 1 && !document.getElementById(link.hash.slice(1))) wrong.push("dead link " + link.hash);
  for (const picture of document.images)
    if (picture.complete && !picture.naturalWidth) wrong.push("no picture");
  for (const input of document.querySelectorAll("input"))
    for (const value of [input.min, input.max, "abc", "-1e300", input.defaultValue]) {
      input.value = value;
      moved(input);
    }
  for (const choice of document.querySelectorAll("select"))
    for (const option of choice.options) {
      option.selected = true;
      moved(choice);
    }
  for (const button of document.querySelectorAll("button")) button.click();
)" + checks + R"(
  setTimeout(() => {
    const outcome = "opened: " + wrong.join("; ");
    document.title = outcome;
    parent.postMessage(outcome, "*");
  }, 300);
}, 300));
</script>)";
    const std::string whole = report + read_file(page);
    folder.write("page.html", whole);
    const std::string quoted =
        std::regex_replace(nlohmann::json(whole).dump(-1, ' ', true), std::regex("<"), "\\u003c");
    folder.write("frame.html", "<iframe style='border: 0; height: 900px; width: " + std::to_string(width) +
                                   "px'></iframe><script>onmessage = event => document.title = event.data;\n"
                                   "document.querySelector('iframe').srcdoc = " +
                                   quoted + "</script>");
    const std::string command =
        "timeout 120 chromium --headless --no-sandbox --disable-gpu --virtual-time-budget=4000 "
        "--user-data-dir=" +
        folder / "profile" + " --window-size=" + std::to_string(width) + ",900 --dump-dom " +
        folder / (width < 500 ? "frame.html" : "page.html") + " 2>/dev/null > " + folder / "dom";
    if (std::system(command.c_str()) != 0) return "chromium failed";
    const std::string dom = read_file(folder / "dom");
    const size_t title = dom.find("<title>opened: ");
    return title == dom.npos ? "the page has not loaded"
                             : dom.substr(title + 7, dom.find("</title>", title) - title - 7);
}
static const bool NO_BROWSER = std::system("command -v chromium >/dev/null 2>&1") != 0;

// Writes the pages of make read to the folder: read.html and ladders.html.
static void make_read(const Folder& folder) {
    const std::string command =
        "python3 dev/read.py " + folder / "read.html" + " > " + folder / "out" + " 2>&1";
    const int status = std::system(command.c_str());
    INFO(read_file(folder / "out"));
    REQUIRE(status == 0);
}

TEST_CASE("make read: the course beside its code; every name in WALK.md has one definition") {
    const Folder folder;
    make_read(folder);
    const std::string page = read_file(folder / "read.html");
    CHECK(contains(page, "uint16_t"));
    CHECK(!contains(page, "&lt;/"));  // a tag that stands in a paragraph is shown as text
    CHECK(!contains(page, "*</p>"));  // so is a star that ends a caption
}

TEST_CASE("make read: its pages open without an error in any width" * doctest::skip(NO_BROWSER)) {
    const Folder folder;
    make_read(folder);
    for (int width : {360, 1024, 1200, 1440, 1920})
        for (const char* page : {"read.html", "ladders.html"})
            CHECK(opened_in_browser(folder / page, width) == "opened: ");
}

// A guess sets the controls to its question, shows its explanation, and marks the right answer. A new number
// falls onto its code. A slider moves the value of section 2 that is chosen. Play begins again at step 1, and
// stops at the last step.
static const char* const EXPLORE = R"(
  const set = (id, value) => {
    const control = document.getElementById(id);
    if (control.type === "checkbox") control.checked = value;
    else control.value = value;
    moved(control);
  };
  const expect = (wanted, id, when) => {
    const words = document.getElementById(id).textContent.replace(/\s+/g, " ");
    if (!words.includes(wanted)) wrong.push(when + ": " + words);
  };
  const shown = [["value0", "0x01 is 0.0019531"], ["group", "become zero110"], ["kSays", "RMS error 1.3%"],
                 ["delayedSays", "0.50% become zero"], ["memorySays", "--batch 64 --seq 2048"]];
  document.querySelectorAll(".guess").forEach((guess, question) => {
    const answer = guess.querySelector(".answer"), right = guess.querySelector(".right");
    guess.className = "guess";  // as if no button had been clicked
    if (answer.checkVisibility()) wrong.push("an answer before the guess");
    right.click();
    expect(shown[question][1], shown[question][0], "guess " + (question + 1));
    if (!answer.checkVisibility() || getComputedStyle(right).outlineStyle !== "solid") wrong.push("no answer");
  });
  const roundings = {"1.0625": "lies between 1 and 1.125; a tie: this code is even", "-1.1": "between -1.125 and -1",
                     "448": "neighbours: 416 and none", "2^8": "neighbours: 240 and 288", "-2^-9": "exact",
                     "460": "rounds to the largest", "465": "saturates; error: 3.7%", "-inf": "saturates", "nan": "NaN"};
  for (const [typed, wanted] of Object.entries(roundings)) {
    set("number", typed);
    expect(wanted, "value0", typed);
  }
  set("number", 1.1);
  for (const [format, bit, code] of [[0, 7, "0xB9"], [0, 0, "0xB8"], [1, 1, "0xBE"]]) {
    document.querySelector(`[data-format="${format}"][data-bit="${bit}"]`).click();
    expect(code, "value" + format, "bit " + bit);
  }
  set("number", 1.1);
  if (document.querySelector(".falls")?.getAnimations().length !== 1) wrong.push("no dot falls");
  set("reset", "");
  set("outlier", 14.873);
  expect("zero20different magnitudes1016mean", "group", "with 30,000");
  for (const [width, chosen, height, value] of [[16, 1, 1, "256"], [128, 128, -1, "-256"], [4, 4, -0.5, "-1"]]) {
    set("width", width);
    set("chosen", chosen);
    set("moved", height);
    expect(value, "movedSays", "value " + chosen);
  }
  const [now, play] = ["now", "play"].map(id => document.getElementById(id));
  now.value = 200;
  play.checked = true;
  setTimeout(() => {
    if (now.value === "200" || !play.checked) wrong.push("Play is at step " + now.value);
    now.value = 199;
  }, 100);
  setTimeout(() => { if (now.value !== "200" || play.checked) wrong.push("Play is at step " + now.value); }, 250);
)";
TEST_CASE("explore.html: it opens without an error in any width" * doctest::skip(NO_BROWSER)) {
    for (int width : {360, 700, 1400})
        CHECK(opened_in_browser("dev/explore.html", width, EXPLORE) == "opened: ");
}

// The lines of a page that begin like this, from the place of `after` on.
static std::vector<std::string> rows(const std::string& page, const std::string& begin,
                                     const std::string& after = "") {
    std::vector<std::string> found;
    REQUIRE(contains(page, after));
    for (const std::string& line : lines_of(page.substr(page.find(after))))
        if (line.starts_with(begin)) found.push_back(line);
    return found;
}

// The cells of a row of a table, and the numbers in a text as they are written: "22,830", "0.009".
static std::vector<std::string> cells(const std::string& row) {
    std::vector<std::string> found;
    std::istringstream in(row.substr(1));
    for (std::string cell; std::getline(in, cell, '|');) found.push_back(cell);
    return found;
}
static std::vector<std::string> numbers(const std::string& text) {
    const std::regex number("[0-9][0-9,.]*[0-9]|[0-9]");
    return {std::sregex_token_iterator(text.begin(), text.end(), number), std::sregex_token_iterator()};
}

TEST_CASE("README.md: each row of its table of speeds has the figures of the same run in dev/RESULTS.md") {
    // How a row begins in the README, and in RESULTS.md.
    const std::pair<const char*, const char*> runs[] = {
        {"`coat`: ", "| train coat |"},
        {"`bf16` with `--optimizer bf16`", "| train bf16 |"},
        {"PyTorch in BF16", "| PyTorch bf16 |"},
        {"PyTorch with FP8 linear layers", "| PyTorch fp8 |"},
        {"PyTorch with torchao's FP8 linear layers", "| PyTorch torchao |"},
        {"`coat` on one H100", "| 1 GPU: 7b coat, 1 x 2048 |"},
        {"the authors' code on one H100", "| 1 GPU: 7b coat, 1 x 2048 |"},
        {"`coat --ranks 4`", "| 4 GPUs: 7b coat, 8 x 2048 |"}};
    const std::string readme = read_file("README.md"), results = read_file("dev/RESULTS.md");
    const size_t start = readme.find("| Llama-2-7B, 2048 tokens a sequence |");
    REQUIRE(start != std::string::npos);
    const std::vector<std::string> table = lines_of(readme.substr(start, readme.find("\n\n", start) - start));
    size_t checked = 0;
    for (const std::string& row : table)
        for (const auto& [begin, run] : runs) {
            if (!row.starts_with(std::string("| ") + begin)) continue;
            checked++;
            const std::vector<std::string> measured = rows(results, run);
            REQUIRE(measured.size() == 1);
            const std::vector<std::string> all = numbers(measured[0]);
            const std::string speed = numbers(cells(row)[2])[0], memory = numbers(cells(row)[3])[0];
            CHECK_MESSAGE(std::count(all.begin(), all.end(), speed), row << " beside " << measured[0]);
            CHECK_MESSAGE(std::count(all.begin(), all.end(), memory), row << " beside " << measured[0]);
        }
    CHECK(checked == std::size(runs));
    CHECK(table.size() == 2 + checked);  // after its head
}

TEST_CASE("README.md: its table of losses has the figures of dev/RESULTS.md and results.json") {
    const std::string readme = read_file("README.md"), results = read_file("dev/RESULTS.md");
    const auto recorded = nlohmann::json::parse(read_file("dev/results.json"));
    for (const auto& [begin, group] :
         {std::pair{"| GPT-2 124M", "convergence"}, {"| TinyLlama-1.1B", "large"}}) {
        CAPTURE(begin);
        const std::vector<std::string> cell = cells(rows(readme, begin).at(0));
        // Where bf16 ends: the means over its seeds.
        double training = 0, validation = 0, seeds = 0;
        for (const auto& [name, run] : recorded.at(group).items()) {
            if (!name.starts_with("bf16")) continue;
            training += run.at("train").back().get<double>();
            validation += run.at("validation").back().at(1).get<double>();
            seeds++;
        }
        auto text = [](double x) {
            char digits[100];
            std::snprintf(digits, sizeof digits, " %.3f ", x);
            return std::string(digits);
        };
        CHECK(cell[1] == text(training / seeds));
        CHECK(cell[2] == text(validation / seeds));
        CHECK(numbers(cell[5]).at(0) == std::to_string(int(seeds)));
        // What coat is above it: rounded from the means and standard errors of RESULTS.md.
        const std::string measured = rows(results, "| coat |", concat("<!-- ", group, " -->")).at(0);
        const std::vector<std::string> exact = numbers(cells(measured)[1] + cells(measured)[2]),
                                       rounded = numbers(cell[3] + cell[4]);
        REQUIRE(exact.size() == rounded.size());
        for (size_t i = 0; i < exact.size(); i++)
            CHECK(std::stod(rounded[i]) == doctest::Approx(std::stod(exact[i])).scale(1).epsilon(0.00051));
    }
}

TEST_CASE("program/README.md: which recipe runs how on a compute capability") {
    const std::string page = read_file("program/README.md");
    for (const Recipe& r : recipes()) {  // its row: "| `fp32`, `bf16` | FP32 | ... |"
        std::string cells;
        for (const int capability : {80, 86, 89, 90, 100, 120}) {
            std::string runs = " error";
            error_of([&] {
                const Recipe ours = recipe_on_gpu(r, capability);
                runs = ours.x.is_fp8() ? " FP8" : ours.compute_format == Format::FP32 ? " FP32" : " BF16";
            });
            cells += runs + " |";
        }
        bool found = false;
        for (const std::string& line : lines_of(page))
            found |= contains(line, concat("`", r.name, "`")) && contains(line, "|" + cells);
        CHECK_MESSAGE(found, std::string(r.name) << " |" << cells);
    }
}

static RunSettings settings_with_coat(const char* model) {
    return {find_row(known_models(), model, ""), find_row(recipes(), "coat", ""),
            find_row(optimizers(), "coat", ""), 1, 2048};
}
// A program without CUDA does not know the whole memory.
static const bool NO_CUDA = arena_bytes(settings_with_coat("llama-2-7b"), false) == 0;

TEST_CASE("program/README.md: which model fits in a GPU" * doctest::skip(NO_CUDA)) {
    const std::string page = read_file("program/README.md");
    for (const char* name : {"tinyllama-1.1b", "llama-2-7b", "llama-3.1-8b", "llama-2-13b", "llama-30b"}) {
        RunSettings s = settings_with_coat(name);
        const std::string by_default = gigabytes(total_bytes(gpu_memory_plan(s)));
        s.recipe.saved_attention = E4M3_PER_1x16;
        s.keep_masters = s.keep_gradients = false;
        const std::string leanest = gigabytes(total_bytes(gpu_memory_plan(s)));
        const std::string row = concat("| `", name, "` | ", by_default, " | ", leanest, " |");
        CHECK_MESSAGE(contains(page, row), row);
    }
}
