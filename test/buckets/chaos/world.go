// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/oxidecomputer/oxide-csi-plugin/test/buckets/buckettest"
)

const (
	store   = "main"
	cluster = "chaos"
	// foreign is a bucket that the driver did not make. It has one object, secret.
	foreign, secret = "by-hand", "secret"
)

// world is the driver, the gateway and the proxy between them, and what was seen.
type world struct {
	opts    options
	dir     string
	gateway *buckettest.Gateway
	proxy   *buckettest.Proxy
	driver  *buckettest.Driver
	root    *s3.Client
	log     *os.File

	mu         sync.Mutex
	rand       *rand.Rand
	counts     map[string]int
	violations []string
	// secrets are the secret keys of all accesses.
	secrets map[string]bool
}

func newWorld(ctx context.Context, o options) (_ *world, err error) {
	w := &world{
		opts: o, rand: rand.New(rand.NewPCG(o.seed, 0)), counts: map[string]int{}, secrets: map[string]bool{},
	}
	if w.dir, err = os.MkdirTemp("", "buckets"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.end(false))
		}
	}()
	if w.log, err = os.Create(filepath.Join(w.dir, "driver.log")); err != nil {
		return nil, err
	}
	if w.gateway, err = buckettest.NewGateway(w.dir, true); err != nil {
		return nil, err
	}
	gatewayLog, err := os.Create(filepath.Join(w.dir, "gateway.log"))
	if err != nil {
		return nil, err
	}
	w.gateway.Log = gatewayLog
	if err := w.gateway.Start(ctx); err != nil {
		return nil, err
	}
	if w.proxy, err = buckettest.NewProxy(w.gateway.Endpoint); err != nil {
		return nil, err
	}
	w.driver, err = buckettest.NewDriver(o.program, w.dir, cluster, buckettest.Store{
		Name: store, Endpoint: w.proxy.Endpoint, AccessKey: w.gateway.AccessKey, SecretKey: w.gateway.SecretKey,
	})
	if err != nil {
		return nil, err
	}
	w.driver.Log = w.log
	w.driver.Settle = 4 * buckettest.ShortDelay // longer than a request is on its way
	if err := w.driver.Start(ctx); err != nil {
		return nil, err
	}
	w.secrets[w.gateway.SecretKey] = true
	w.root = w.gateway.Root()
	if _, err := w.root.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String(foreign)}); err != nil {
		return nil, err
	}
	return w, put(ctx, w.root, foreign, secret, "text")
}

// end stops everything, and removes the folder unless it is to be kept.
func (w *world) end(keep bool) error {
	var err error
	if w.driver != nil {
		err = errors.Join(err, w.driver.Stop())
	}
	if w.proxy != nil {
		w.proxy.Close()
	}
	if w.gateway != nil {
		err = errors.Join(err, w.gateway.Kill())
	}
	if keep {
		fmt.Printf("chaos: data and logs are in %s\n", w.dir)
		return err
	}
	return errors.Join(err, os.RemoveAll(w.dir))
}

// begin lets requests of the driver fail.
func (w *world) begin() {
	faults := []buckettest.Fault{
		buckettest.Refuse, buckettest.Lose, buckettest.Lose, buckettest.Delay, buckettest.Delay,
	}
	w.proxy.SetFault(func(*http.Request) buckettest.Fault {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.rand.Float64() >= w.opts.faults {
			return buckettest.Pass
		}
		w.counts["faults"]++
		return faults[w.rand.IntN(len(faults))]
	})
}

// kill kills driver and gateway, and starts them again, until the context ends. It leaves both running.
func (w *world) kill(ctx context.Context) {
	for {
		w.mu.Lock()
		pause := time.Duration(w.rand.ExpFloat64() * float64(w.opts.kills))
		gateway := w.rand.IntN(2) == 0
		w.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		var process interface {
			Kill() error
			Start(context.Context) error
		} = w.driver
		name := "kills of the driver"
		if gateway {
			process, name = w.gateway, "kills of the gateway"
		}
		w.count(name)
		if err := errors.Join(process.Kill(), process.Start(context.WithoutCancel(ctx))); err != nil {
			w.violation("%s: %v", name, err)
			return
		}
	}
}

func (w *world) count(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts[what]++
}

func (w *world) violation(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	fmt.Println("VIOLATION:", text)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.violations = append(w.violations, text)
}

func (w *world) report() {
	var counts []string
	for _, what := range slices.Sorted(maps.Keys(w.counts)) {
		counts = append(counts, fmt.Sprintf("%s %d", what, w.counts[what]))
	}
	fmt.Println("chaos:", strings.Join(counts, ", "))
}
