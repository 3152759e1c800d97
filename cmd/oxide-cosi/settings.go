// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
)

// settings are the flags of the driver. All but --settle have a variable with the same meaning. A flag wins.
type settings struct {
	endpoint, clusterID, stores, logLevel string
	settle                                time.Duration
}

// defaultSettle is long for a request on its way, and short for a CO that repeats a call.
const defaultSettle = 3 * time.Second

func (s *settings) flags(flags *pflag.FlagSet, getenv func(string) string) {
	flags.StringVar(&s.endpoint, "endpoint", getenv("COSI_ENDPOINT"),
		"unix socket to serve on, as unix:///PATH.sock (COSI_ENDPOINT)")
	flags.StringVar(&s.clusterID, "cluster-id", getenv("OXIDE_COSI_CLUSTER_ID"),
		"ID of this cluster in the stores; never change it (OXIDE_COSI_CLUSTER_ID)")
	flags.StringVar(&s.stores, "stores", getenv("OXIDE_COSI_STORES"),
		"YAML file of the stores (OXIDE_COSI_STORES)")
	flags.DurationVar(&s.settle, "settle", defaultSettle,
		"after a driver was killed, wait so long until its last requests to the stores have ended")
	level := getenv("OXIDE_COSI_LOG_LEVEL")
	if level == "" {
		level = "info"
	}
	flags.StringVar(&s.logLevel, "log-level", level, "debug, info, warn or error (OXIDE_COSI_LOG_LEVEL)")
}

// configError is a problem of the configuration.
type configError struct{ error }

// load returns the path of the socket, the log level and the stores. The error joins all problems.
func (s *settings) load() (path string, level slog.Level, stores []buckets.StoreOptions, err error) {
	var problems []error
	path = strings.TrimPrefix(s.endpoint, "unix://")
	if !filepath.IsAbs(path) || !strings.HasSuffix(path, ".sock") {
		problems = append(problems, fmt.Errorf("--endpoint: %q is no unix:///PATH.sock", s.endpoint))
	}
	if err := level.UnmarshalText([]byte(s.logLevel)); err != nil {
		problems = append(problems, fmt.Errorf("--log-level: %q is none of debug, info, warn, error", s.logLevel))
	}
	if s.stores == "" {
		problems = append(problems, errors.New("--stores is missing: name the YAML file of the stores"))
	} else if stores, err = readStores(s.stores); err != nil {
		problems = append(problems, err)
	}
	return path, level, stores, errors.Join(problems...)
}

// storeFile is the file of the stores. Paths in it are relative to its folder.
type storeFile struct {
	Stores []struct {
		// Name is the value of the class's parameter store.
		Name string `yaml:"name"`
		// Endpoint is the URL of the gateway for the driver.
		Endpoint string `yaml:"endpoint"`
		// WorkloadEndpoint is the URL that workloads get, if it is another one.
		WorkloadEndpoint string `yaml:"workloadEndpoint"`
		// Region is the gateway's region (us-east-1).
		Region string `yaml:"region"`
		// CAFile has the authorities to trust instead of those of the system.
		CAFile string `yaml:"caFile"`
		// KeysFolder has the gateway's root keys, in the files access-key and secret-key.
		KeysFolder string `yaml:"keysFolder"`
	} `yaml:"stores"`
}

// defaultRegion is versitygw's default.
const defaultRegion = "us-east-1"

// readStores reads the file of the stores with the keys and certificates that it names.
func readStores(path string) ([]buckets.StoreOptions, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--stores: %w", err)
	}
	var file storeFile
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true) // a misspelled key is an error
	if err := decoder.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("--stores: %s: %w", path, err)
	}
	var stores []buckets.StoreOptions
	var problems []error
	for _, entry := range file.Stores {
		options := buckets.StoreOptions{
			Name: entry.Name, Endpoint: entry.Endpoint, WorkloadEndpoint: entry.WorkloadEndpoint, Region: entry.Region,
		}
		if options.Region == "" {
			options.Region = defaultRegion
		}
		read := func(name string) string {
			if !filepath.IsAbs(name) {
				name = filepath.Join(filepath.Dir(path), name)
			}
			content, err := os.ReadFile(name)
			if err != nil {
				problems = append(problems, fmt.Errorf("store %q: %w", entry.Name, err))
			}
			return string(content)
		}
		options.AccessKey = strings.TrimSpace(read(filepath.Join(entry.KeysFolder, "access-key")))
		options.SecretKey = strings.TrimSpace(read(filepath.Join(entry.KeysFolder, "secret-key")))
		if entry.CAFile != "" {
			options.CA = []byte(read(entry.CAFile))
		}
		stores = append(stores, options)
	}
	return stores, errors.Join(problems...)
}
