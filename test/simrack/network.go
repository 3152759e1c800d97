// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"sync"
	"time"
)

// Listener wraps the listener of a server of [Rack.API], so that faults can reset a connection or make it go silent.
// The server also needs [ConnContext].
func Listener(l net.Listener) net.Listener { return listener{l} }

type listener struct{ net.Listener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &connection{Conn: c, silent: make(chan struct{})}, nil
}

// connection is a connection of a client to the rack's API. With HTTP/2 all calls of a client share it.
type connection struct {
	net.Conn
	once sync.Once
	// silent is closed when the connection goes silent.
	silent chan struct{}
}

// goSilent makes the connection swallow what both sides send. Neither side sees its end: so behaves a connection whose
// path through the network is gone.
func (c *connection) goSilent() { c.once.Do(func() { close(c.silent) }) }

func (c *connection) isSilent() bool {
	select {
	case <-c.silent:
		return true
	default:
		return false
	}
}

func (c *connection) Write(p []byte) (int, error) {
	if c.isSilent() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *connection) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.isSilent() {
			return n, err
		}
	}
}

// reset ends the connection with a reset.
func (c *connection) reset() error {
	if tcp, is := c.Conn.(*net.TCPConn); is {
		// Without a linger time the kernel sends a reset.
		if err := tcp.SetLinger(0); err != nil {
			return err
		}
	}
	return c.Close()
}

type connectionKey struct{}

// ConnContext is for [net/http.Server.ConnContext] of a server with a [Listener]. It lets a call find its connection.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if secure, is := c.(*tls.Conn); is {
		c = secure.NetConn()
	}
	return context.WithValue(ctx, connectionKey{}, c)
}

// connectionOf returns the connection of a call, or nil if the server has no [Listener] and [ConnContext].
func connectionOf(ctx context.Context) *connection {
	c, _ := ctx.Value(connectionKey{}).(*connection)
	return c
}

// certificateLife is the life of the certificate of [NewCertificate].
const certificateLife = 24 * time.Hour

// NewCertificate makes a certificate for a rack on a loopback address, and its private key, both in PEM. The
// certificate signs itself, so it is also the CA's certificate that a client needs.
func NewCertificate() (certificate, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, nil, fmt.Errorf("make a serial number: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: "simulated rack"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(certificateLife),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IsCA:                  true,
		BasicConstraintsValid: true,
		DNSNames:              []string{"localhost"},
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		return nil, nil, fmt.Errorf("make a certificate: %w", err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), nil
}
