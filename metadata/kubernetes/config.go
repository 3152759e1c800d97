// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"bytes"
	"cmp"
	"errors"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"

	// The authentication methods that a kubeconfig file can name.
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// serviceAccount is where Kubernetes puts a pod's credentials.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// source is the file or folder with the credentials.
func (o Options) source() string {
	if o.Kubeconfig != "" {
		return o.Kubeconfig
	}
	return o.ServiceAccount
}

// HasCredentials reports whether the options lead to credentials. A container of a pod may have none.
func (o Options) HasCredentials() bool {
	if o.Kubeconfig != "" {
		return true
	}
	_, err := os.Stat(filepath.Join(cmp.Or(o.ServiceAccount, serviceAccount), "token"))
	return err == nil && o.Host != ""
}

// config reads the configuration for client-go. client-go reads token and certificate files again when they change.
func (o Options) config() (*rest.Config, error) {
	config, err := o.inCluster()
	if o.Kubeconfig != "" {
		config, err = fromKubeconfig(o.Kubeconfig)
	}
	if err != nil {
		return nil, err
	}
	if err := checkToken(config.BearerTokenFile); err != nil {
		return nil, err
	}
	config.UserAgent = "oxide-csi"
	config.QPS = -1 // no limit here: the API server has its own
	config.WarningHandler = rest.NoWarnings{}
	config.Dial = o.Dial
	return config, nil
}

// inCluster is the configuration of a pod with a service account.
func (o Options) inCluster() (*rest.Config, error) {
	if o.Host == "" {
		return nil, metadata.Invalid("this is not a pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set", nil,
			"name a kubeconfig file by --kubeconfig, or choose another source by --metadata")
	}
	port := o.Port
	if port == "" {
		port = "443"
	}
	return &rest.Config{
		Host:            "https://" + net.JoinHostPort(o.Host, port),
		TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(o.ServiceAccount, "ca.crt")},
		BearerTokenFile: filepath.Join(o.ServiceAccount, "token"),
	}, nil
}

// fromKubeconfig is the configuration in the current context of a kubeconfig file.
func fromKubeconfig(file string) (*rest.Config, error) {
	loaded, err := (&clientcmd.ClientConfigLoadingRules{ExplicitPath: file}).Load()
	var path *fs.PathError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, metadata.NotReady("read the kubeconfig "+file, pathless(err),
			"check the path, and that the program that writes this file has run")
	case errors.As(err, &path):
		return nil, metadata.Invalid("read the kubeconfig "+file, path.Err,
			"name a file that the plugin may read by --kubeconfig")
	case err != nil:
		// The decoder's error may quote the file, which holds secrets.
		err = errors.New("it is not a kubeconfig file in YAML")
	default:
		err = checkURLs(loaded)
	}
	var config *rest.Config
	if err == nil {
		config, err = clientcmd.NewNonInteractiveClientConfig(*loaded, loaded.CurrentContext, nil, nil).ClientConfig()
	}
	if err == nil {
		err = checkServer(config.Host)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, metadata.NotReady("wait for a file that the kubeconfig "+file+" names", oneLine(err),
			"check its path, and that the program that writes it has run")
	}
	if err != nil {
		return nil, metadata.Invalid("the kubeconfig "+file+" cannot be used", oneLine(err),
			"repair it, or name another one by --kubeconfig")
	}
	if config.ExecProvider != nil {
		config.ExecProvider.InteractiveMode = clientcmdapi.NeverExecInteractiveMode
	}
	return config, nil
}

// checkURLs rejects a malformed proxy URL, which clientcmd would quote in its error: the URL may hold a password.
func checkURLs(config *clientcmdapi.Config) error {
	for _, cluster := range config.Clusters {
		if _, err := url.Parse(cluster.ProxyURL); err != nil {
			return errors.New("its proxy-url is no URL")
		}
	}
	return nil
}

// checkServer rejects a malformed address of the API server, and one with a password: errors quote the address.
func checkServer(host string) error {
	server, err := url.Parse(host)
	if err != nil || server.Host == "" || server.Scheme != "https" && server.Scheme != "http" || server.User != nil {
		return errors.New("its server is not https://host:port")
	}
	return nil
}

// checkToken returns an error with the operator's next step if the token file cannot be read or is empty. client-go's
// own error has none. An empty name is no error.
func checkToken(file string) error {
	if file == "" {
		return nil
	}
	token, err := os.ReadFile(file)
	if err == nil && len(bytes.TrimSpace(token)) > 0 {
		return nil
	}
	e := metadata.NotReady("wait for the token in "+file, pathless(err),
		"check the pod's service account, and that automountServiceAccountToken is not false")
	if errors.Is(err, fs.ErrPermission) {
		e.Kind, e.What = metadata.ErrInvalid, "read the token in "+file
		e.Next = "make it readable for the plugin's user"
	}
	return e
}

// pathless returns the error without the path in front of it.
func pathless(err error) error {
	if wrapped := (*fs.PathError)(nil); errors.As(err, &wrapped) {
		return wrapped.Err
	}
	return err
}
