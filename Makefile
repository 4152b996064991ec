# make train      the program ./train; with the GPU in it where nvcc is found
# make test       every test; the last line is "N passed, N failed, N skipped".
#                 TEST_ARGS="--test-case='*group*'" chooses tests by name
# make sanitize   the same tests, smaller, under AddressSanitizer and UBSan, without the GPU; SANITIZE=thread chooses
#                 ThreadSanitizer (for which tests, test/README.md says)
# make bench      every operator of a step and the whole step, measured on this GPU (dev/bench.cu): a table,
#                 build/bench.json and build/bench.svg. BENCH_ARGS="--model gpt2 --recipe bf16" chooses another run
# make ladders    kernels built up step by step (dev/ladders); dev/gpu.sh ladders runs them
# make all        every program and exercise; it runs none
# make exercise N=3   what the judge says of dev/exercises/03-...; it needs the number N; HINT=1 adds a hint
# make read       build/read.html: the course beside the code of the CPU, of the GPU and of the tests, as one page;
#                 build/ladders.html: the ladders (dev/ladders), rung by rung
# make figures    draws the figures of the course again, into build/figures/drawn (needs Python's matplotlib)
# make clean      removes what was built
# make help       prints this
# make build/tests, make build/ladder_adamw, make build/coat.cu.o   one program or one object, by its name
#
# Settings are given as in `make NVCC= train`:
# NVCC=           builds for the CPU alone; NVCC=/path/to/nvcc chooses one, of CUDA 12.9 or newer
# GPU_ARCH=90a    the GPU for which kernels are compiled: its compute capability without the point, and from 9.0 on
#                 the letter a, which adds instructions of that one generation. Otherwise it is the GPU that
#                 nvidia-smi finds, or 90a
# OPT="-O1 -g"    adds what debuggers and profilers need. OPT is that of every file then, also of the CPU reference,
#                 which is otherwise compiled with -O3
# O=build/cpu     builds in this folder, ./train too

CXX  ?= g++
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
NVCC := $(NVCC)# it is looked for once, not at every use
O    ?= build
OPT  ?= -O1

# make runs as many jobs as there are cores. A make that another one starts, as in `make sanitize`, shares them.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif

# ---------------------------------------------------------------------------------------------------------------
# Sources. nvcc compiles .cu files, and the .cpp files of gpu/, which include CUDA's headers; $(CXX) all others

REFERENCE := $(wildcard reference/*.cpp)
HOST      := $(REFERENCE) $(wildcard program/*.cpp data/*.cpp)
TESTS     := $(wildcard test/*.cpp test/*/*.cpp)
JUDGE     := $(wildcard dev/exercises/judge_*.cpp) dev/exercises/capstone.cpp
EXERCISES := $(wildcard dev/exercises/[0-9]*.cpp dev/exercises/[0-9]*.cu)
ifeq ($(NVCC),)
GPU       := gpu/no_cuda.cpp gpu/recipe_on_gpu.cpp gpu/memory_layout.cpp gpu/extra_buffers.cpp
else
GPU       := $(wildcard *.cu gpu/*.cu) $(filter-out gpu/no_cuda.cpp,$(wildcard gpu/*.cpp))
TESTS     += $(wildcard test/*.cu test/*/*.cu)
endif

object  = $(patsubst %,$(O)/%.o,$(1))
# All of the program but main(), which tests replace. What takes longest comes first, so that all cores work to the
# end. The order counts for linking, too: CUDA learns of the kernels in the first files, and then the tests ask,
# before main(), whether the GPU can run them.
OBJECTS := $(call object,$(GPU) $(filter-out program/main.cpp,$(HOST)))

# ---------------------------------------------------------------------------------------------------------------
# Programs, and the objects of which each is linked

PROGRAM  := $(if $(filter build,$(O)),train,$(O)/train)
LADDERS  := $(patsubst dev/ladders/%.cu,$(O)/ladder_%,$(wildcard dev/ladders/*.cu))
EXERCISE := $(firstword $(wildcard dev/exercises/$(N)-* dev/exercises/0$(N)-*))

$(PROGRAM):         $(call object,program/main.cpp) $(OBJECTS)
$(O)/tests:         $(OBJECTS) $(call object,$(TESTS) $(JUDGE))
$(O)/bench:         $(OBJECTS) $(call object,dev/bench.cu)
$(LADDERS):         $(O)/ladder_%: $(OBJECTS) $(O)/dev/ladders/%.cu.o
$(O)/exercise_$(N): $(call object,$(EXERCISE) $(JUDGE) $(filter-out reference/model.cpp,$(REFERENCE)))

$(PROGRAM) $(O)/tests $(O)/bench $(LADDERS) $(O)/exercise_$(N): $(O)/objects
	$(LINK) -o $@ $(filter %.o,$^) $(LIBRARIES)

# ---------------------------------------------------------------------------------------------------------------
# Commands

.PHONY: all ladders test sanitize bench exercise need-number read figures clean help FORCE

all: $(PROGRAM) $(O)/tests $(call object,$(EXERCISES)) $(if $(NVCC),$(O)/bench ladders)
ladders: $(LADDERS)

test: $(PROGRAM) $(O)/tests
	OMP_WAIT_POLICY=passive COAT_TRAIN=$(abspath $(PROGRAM)) $(O)/tests $(TEST_ARGS)

# With the sanitizers' code in it, GCC finds uninitialized values in std::regex where there are none.
SANITIZE ?= address,undefined
sanitize:
	COAT_QUICK=1 UBSAN_OPTIONS=print_stacktrace=1 $(MAKE) --no-print-directory test O=build/sanitize-$(SANITIZE) \
	    NVCC= OPT="-O1 -g -fsanitize=$(SANITIZE) -fno-sanitize-recover=all -Wno-maybe-uninitialized"

bench: $(O)/bench
	$(O)/bench --json $(O)/bench.json $(BENCH_ARGS)
	python3 dev/plot.py bench $(O)/bench.json > $(O)/bench.svg

exercise: $(if $(EXERCISE),$(O)/exercise_$(N),need-number)
	@$(O)/exercise_$(N)
need-number:
	@echo "Which exercise? For example: make exercise N=3" >&2; exit 1

read:
	@python3 dev/read.py $(abspath $(O))/read.html
figures: $(PROGRAM)
	python3 dev/figures.py $(abspath $(PROGRAM))
# The comment at the top of this file.
help:
	@sed -n '/^#/!q; s/^# \?//p' Makefile
# A folder that was built in has a file settings. Any other may have sources, as in `make clean O=gpu`.
clean:
	$(if $(wildcard $(O)/settings),rm -rf $(O) $(PROGRAM))

# ---------------------------------------------------------------------------------------------------------------
# Flags

# Most of this code waits for files, people or the GPU, so -O1 is enough; the reference has long loops. Contraction
# (a * b + c as one instruction) stays on: without it the GEMMs run at half the speed. The same program gives the same
# bits every time; another compiler or processor may not. -ffast-math stays off, because NaN and infinity are part of
# the method.
CXXFLAGS = -std=c++20 $(OPT) -march=native -fopenmp -fno-math-errno -Wall -Wextra $(WERROR)
WERROR  := -Werror
$(call object,$(REFERENCE)): private OPT = -O3
# An exercise that is half written compiles: its warnings are shown, and the judge says what is wrong.
$(call object,$(EXERCISES)): private override WERROR :=

ifeq ($(NVCC),)
LINK = $(CXX) -fopenmp $(OPT)
else
# From what nvidia-smi prints, such as 9.0 and a line for each other GPU. BF16 arithmetic begins with 8.0.
ifndef GPU_ARCH
GPU_ARCH := $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | \
                         sed -nE '1s/^(8)\.(.)$$/\1\2/p; 1s/^(9|1.)\.(.)$$/\1\2a/p'),90a)
endif
# $(OPT) is for the host's code in .cu files, which launches kernels. nvcc always optimizes the kernels fully, several
# of a file at a time (--split-compile).
NVCCFLAGS = -std=c++20 $(OPT) $(if $(filter -g,$(OPT)),-lineinfo) --split-compile=0 \
            -gencode=arch=compute_$(GPU_ARCH),code=sm_$(GPU_ARCH) \
            $(WERROR:%=% all-warnings) -Xcompiler -fopenmp,-Wall,-Wextra$(WERROR:%=,%)
# These have no kernels. As C++ nvcc reads them once, which takes 3 seconds each instead of 8.
$(call object,model.cu dev/bench.cu test/dev/bench.cu $(wildcard test/*.cu test/gpu/*.cu)): private NVCCFLAGS += -x c++
# A program looks for CUDA's libraries beside nvcc, too; it needs only those that it uses (an exercise: none).
CUDA_BIN  = $(dir $(realpath $(shell command -v $(lastword $(NVCC)))))
LINK      = $(NVCC) -Xcompiler -fopenmp -Xlinker -rpath=$(CUDA_BIN)../lib64
LIBRARIES = -Xlinker --as-needed -lcublasLt -ldl
endif

# ---------------------------------------------------------------------------------------------------------------
# Objects

# Each depends on this Makefile, and on the file settings. So what is compiled by another compiler, for another
# processor or with other flags is compiled again, and no program has objects of two kinds.
$(O)/%.cpp.o: %.cpp Makefile $(O)/settings
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@
ifeq ($(NVCC),)
# As C++ the kernel of an exercise is a function, which the CPU runs (dev/exercises/kernel_on_cpu.h).
$(O)/dev/exercises/%.cu.o: dev/exercises/%.cu Makefile $(O)/settings
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -MMD -MP -x c++ -c $< -o $@
$(O)/%.cu.o: FORCE  # also where a build with nvcc has made it
	@echo "$*.cu is for GPUs: to compile it takes nvcc, of CUDA 12.9 or newer." >&2; exit 1
else
$(O)/%.cu.o: %.cu Makefile $(O)/settings
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(O)/gpu/%.cpp.o: gpu/%.cpp Makefile $(O)/settings
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
endif

# What is printed of an nvcc that is too old; $2 is its version.
TOO_OLD = "$(NVCC) is of CUDA " $$2 + 0 ", and CUDA 12.9 or newer is needed. Give a newer one, NVCC=/path/to/nvcc;" \
          " or build for the CPU alone, as in: make NVCC= train"
# A file is written as FILE.new, and becomes FILE only if it differs. So what depends on it is not made again.
KEEP_IF_SAME = if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
# COMPILERS is a checksum of what the compilers say of their versions, and of the
# instructions that -march=native allows.
COMPILERS = $(shell { $(CXX) -march=native -E -v -x c++ /dev/null; $(if $(NVCC),$(NVCC) --version;) } 2>&1 | cksum)
$(O)/settings: FORCE
	@mkdir -p $(@D)
	@$(if $(NVCC),$(NVCC) --version | awk -F'release ' '$$2 + 0 && $$2 + 0 < 12.9 { print $(TOO_OLD); exit 1 }' >&2)
	@printf '%s\n' 'CXX=$(CXX)' 'NVCC=$(NVCC)' 'COMPILERS=$(COMPILERS)' 'GPU_ARCH=$(GPU_ARCH)' 'OPT=$(OPT)' \
	                'WERROR=$(WERROR)' > $@.new
	@$(KEEP_IF_SAME)

# The names of all objects. When a source was added or deleted, programs are linked again.
$(O)/objects: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' $(OBJECTS) $(call object,$(TESTS) $(JUDGE)) > $@.new
	@$(KEEP_IF_SAME)

# Beside each object lies a file that names the headers which its source includes.
FILES := $(wildcard *.cpp *.cu */*.cpp */*.cu */*/*.cpp */*/*.cu)
-include $(FILES:%=$(O)/%.d)
