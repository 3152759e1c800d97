// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// kubeconfig is what is read of such a file: client-go, tools/clientcmd/api/v1,
// which is not linked for its weight.
type kubeconfig struct {
	CurrentContext string `yaml:"current-context"`
	Contexts       []struct {
		Name    string
		Context struct{ Cluster, User string }
	}
	Clusters []struct {
		Name    string
		Cluster cluster
	}
	Users []struct {
		Name string
		User user
	}
}

type cluster struct {
	Server     string
	CAFile     string `yaml:"certificate-authority"`
	CAData     string `yaml:"certificate-authority-data"`
	Insecure   bool   `yaml:"insecure-skip-tls-verify"`
	ServerName string `yaml:"tls-server-name"`
	ProxyURL   string `yaml:"proxy-url"`
}

type user struct {
	CertFile  string `yaml:"client-certificate"`
	CertData  string `yaml:"client-certificate-data"`
	KeyFile   string `yaml:"client-key"`
	KeyData   string `yaml:"client-key-data"`
	Token     string
	TokenFile string `yaml:"tokenFile"`
	// The ways of being somebody that are refused.
	Exec         yaml.Node
	AuthProvider yaml.Node `yaml:"auth-provider"`
	Username     string
	Impersonate  string `yaml:"as"`
}

// fromKubeconfig reads the current context of a kubeconfig file.
func fromKubeconfig(file string) (access, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		e := &metadata.Error{
			Kind: metadata.ErrNotReady, What: "read the kubeconfig " + file, Cause: pathless(err),
			Next: "check that whoever writes it has done so, and that the path is right",
		}
		if !errors.Is(err, fs.ErrNotExist) {
			e.Kind, e.Next = metadata.ErrInvalid, "name a file that the plugin may read by --kubeconfig"
		}
		return access{}, e
	}
	a, err := parseKubeconfig(text, filepath.Dir(file))
	if err != nil {
		return access{}, &metadata.Error{
			Kind: metadata.ErrInvalid, What: "the kubeconfig " + file + " cannot be used", Cause: err,
			Next: "repair it, or name another one by --kubeconfig",
		}
	}
	a.from = file
	return a, a.checkFiles()
}

// parseKubeconfig makes an access of a kubeconfig's current context. Paths in it
// are relative to dir. No error repeats what the file holds: it is full of secrets.
func parseKubeconfig(text []byte, dir string) (access, error) {
	var k kubeconfig
	if err := yaml.Unmarshal(text, &k); err != nil {
		return access{}, errors.New("it is not the YAML of a kubeconfig")
	}
	for _, c := range k.Contexts {
		if c.Name != k.CurrentContext {
			continue
		}
		for _, cluster := range k.Clusters {
			for _, user := range k.Users {
				if cluster.Name == c.Context.Cluster && user.Name == c.Context.User {
					return makeAccess(cluster.Cluster, user.User, dir)
				}
			}
		}
		return access{}, errors.New("it lacks the cluster or the user of its current context")
	}
	return access{}, errors.New("it lacks its current-context")
}

func makeAccess(c cluster, u user, dir string) (a access, err error) {
	server, err := url.Parse(c.Server)
	if err != nil || server.Host == "" || server.Scheme != "https" && server.Scheme != "http" || server.User != nil {
		return access{}, errors.New("its server is not https://host:port")
	}
	a.server = strings.TrimSuffix(c.Server, "/")
	if c.ProxyURL != "" {
		if a.proxy, err = url.Parse(c.ProxyURL); err != nil {
			return access{}, errors.New("its proxy-url is no URL")
		}
	}
	for _, way := range []struct {
		name string
		used bool
	}{
		{"exec", !u.Exec.IsZero()}, {"auth-provider", !u.AuthProvider.IsZero()}, {"username", u.Username != ""}, {"as", u.Impersonate != ""},
	} {
		if way.used {
			return access{}, fmt.Errorf(
				"its user has %q, which this plugin does not do: give a token, a tokenFile or a client certificate",
				way.name,
			)
		}
	}
	path := func(name string) string {
		if name == "" || filepath.IsAbs(name) {
			return name
		}
		return filepath.Join(dir, name)
	}
	t := &a.config.TLS
	t.Insecure, t.ServerName = c.Insecure, c.ServerName
	t.CAFile, t.CertFile, t.KeyFile = path(c.CAFile), path(u.CertFile), path(u.KeyFile)
	for _, data := range []struct {
		name, text string
		to         *[]byte
	}{
		{"certificate-authority-data", c.CAData, &t.CAData}, {"client-certificate-data", u.CertData, &t.CertData}, {"client-key-data", u.KeyData, &t.KeyData},
	} {
		if *data.to, err = base64.StdEncoding.DecodeString(data.text); err != nil {
			return access{}, fmt.Errorf("its %s is not base64", data.name)
		}
	}
	a.config.BearerToken, a.config.BearerTokenFile = u.Token, path(u.TokenFile)
	return a, nil
}
