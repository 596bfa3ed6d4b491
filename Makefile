# Two commands do all the set-up: `make dev` runs the platform, `make test`
# passes the tests. Both find or install what they need.

GO       ?= go
BIN      := bin/weir
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS  := -s -w -X main.version=$(VERSION)
LINT     := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
FUZZTIME ?= 5m
DURATION ?= 30m
SEED     ?=
FAULTS    = WEIR_FAULTS_SEED=$(SEED) WEIR_FAULTS_BINARY=$(CURDIR)/$(BIN) $(GO) test ./cmd/weir/faults -count 1 -v

.PHONY: dev build test check generate lint fmt bench deploy-check faults soak fuzz clean postgres pgbouncer

## dev: run everything in one process, with a private Postgres in ./.weir
dev: postgres build
	@exec ./$(BIN) dev

## build: the one binary
build:
	@$(GO) build -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/weir

## test: format, vet, lint, generated code, every test with -race on a real Postgres
test: postgres pgbouncer check
	$(GO) test -race -timeout 12m ./...

## check: what needs no database
check: fmt generate lint

fmt:
	@out=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$out" || { echo "not formatted:"; echo "$$out"; exit 1; }
	@$(GO) vet ./...

## generate: generated code must be what the sources say
generate:
	@sh .ci/generated.sh

lint:
	@GOBIN=$(CURDIR)/bin CGO_ENABLED=0 $(GO) install $(LINT)
	@bin/golangci-lint run

## bench: ours against raw River and peers, interleaved, as ratios
bench: postgres build
	cd bench && $(GO) run . -weir ../$(BIN) $(BENCHFLAGS)

## deploy-check: image, Compose, Helm chart, alerts and dashboards, against rules and the binary
deploy-check: build
	@sh .ci/promtool.sh
	cd deploy/check && $(GO) vet ./... && WEIR_BINARY=$(CURDIR)/$(BIN) $(GO) test -timeout 10m ./...

## faults: processes, connections and servers fail; every promise holds (docs/faults.md)
faults: postgres build
	WEIR_FAULTS=1 $(FAULTS) -timeout 15m -run 'TestFaults$(if $(ROW),/$(ROW))'

## soak: drawn faults under load for DURATION, from SEED
soak: postgres build
	WEIR_FAULTS_SOAK=$(DURATION) $(FAULTS) -timeout 0 -run TestSoak

## fuzz: the hostile edge, FUZZTIME each
fuzz:
	$(GO) test ./api/rpc -run '^$$' -fuzz FuzzServe -fuzztime $(FUZZTIME)
	$(GO) test ./workers/model -run '^$$' -fuzz FuzzOffline -fuzztime $(FUZZTIME)

## postgres: finds Postgres binaries, or installs Debian's
postgres:
	@sh .ci/postgres.sh

## pgbouncer: finds PgBouncer, or installs Debian's
pgbouncer:
	@sh .ci/pgbouncer.sh

clean:
	rm -rf bin .weir
