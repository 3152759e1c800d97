// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"
)

// TestRequestsAreBounded checks that a store never has more than maxRequests requests of the driver at once.
func TestRequestsAreBounded(t *testing.T) {
	var mu sync.Mutex
	now, most := 0, 0
	full := make(chan struct{})
	var once sync.Once
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		now++
		most = max(most, now)
		if now == maxRequests { // leaves time for one too many
			once.Do(func() { time.AfterFunc(100*time.Millisecond, func() { close(full) }) })
		}
		mu.Unlock()
		<-full
		mu.Lock()
		now--
		mu.Unlock()
		w.WriteHeader(http.StatusNotFound)
	}))
	defer server.Close()
	store, err := newStore(StoreOptions{Name: "main", Endpoint: server.URL, Region: "r", AccessKey: "a", SecretKey: "s"})
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range 4 * maxRequests { // what they find does not matter
		group.Go(func() { _, _, _ = store.lookUp(t.Context(), "bucket") })
	}
	group.Wait()
	if most != maxRequests {
		t.Errorf("%d requests at once, want %d", most, maxRequests)
	}
}

// TestStoreEndpoints checks that an endpoint is a host and a port. The path of a request would follow the rest of it.
func TestStoreEndpoints(t *testing.T) {
	for endpoint, valid := range map[string]bool{
		"http://gateway:7070": true, "https://[fe80::1%25eth0]:7070": true,
		"http://gateway:7070/path": false, "http://gateway:7070?a=b": false, "http://gateway:7070#a": false,
		"http://user:canary@gateway:7070": false, "gateway:7070": false,
	} {
		_, err := newStore(StoreOptions{Name: "main", Endpoint: endpoint, Region: "r", AccessKey: "a", SecretKey: "s"})
		if (err == nil) != valid {
			t.Errorf("%s: %v", endpoint, err)
		}
	}
}
