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
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
	"github.com/oxidecomputer/oxide-csi-plugin/test/buckets/buckettest"
)

// worker is a client with buckets of its own.
type worker struct {
	*world
	number, made int
	random       *rand.Rand
	buckets      map[string]*bucket
	// revoked are clients with keys that must be dead.
	revoked []*s3.Client
}

// bucket is a bucket that the driver made, with what the worker knows of it.
type bucket struct {
	name, id       string
	parameters     map[string]string
	objects        map[string]string
	accesses       map[string]*access
	deleteContents bool
}

// access is a granted access.
type access struct {
	name, kind, account string
	keys                string
	client              *s3.Client
}

const (
	mostBuckets  = 3
	mostAccesses = 8
)

func newWorker(w *world, number int) *worker {
	return &worker{
		world: w, number: number, random: rand.New(rand.NewPCG(w.opts.seed, uint64(number+1))), buckets: map[string]*bucket{},
	}
}

// step does one thing.
func (w *worker) step(ctx context.Context) {
	if len(w.buckets) == 0 || len(w.buckets) < mostBuckets && w.random.IntN(6) == 0 {
		w.create(ctx)
		return
	}
	names := slices.Sorted(maps.Keys(w.buckets))
	b := w.buckets[names[w.random.IntN(len(names))]]
	switch n := w.random.IntN(20); {
	case n < 8:
		w.changeAccesses(ctx, b)
	case n < 14:
		w.write(ctx, b)
	case n < 16:
		w.repeat(ctx, b)
	case n < 17:
		w.deleteForeign(ctx)
	default:
		w.delete(ctx, b)
	}
}

func (w *worker) create(ctx context.Context) {
	w.made++
	b := &bucket{
		name: fmt.Sprintf("class-%d-%d", w.number, w.made), objects: map[string]string{}, accesses: map[string]*access{},
		deleteContents: w.random.IntN(2) == 0,
	}
	b.parameters = map[string]string{
		buckets.ParameterStore:          store,
		buckets.ParameterDeleteContents: strconv.FormatBool(b.deleteContents),
		buckets.ParameterVersioning:     strconv.FormatBool(b.deleteContents && w.random.IntN(2) == 0),
	}
	id, ok := w.until(ctx, w.random, "creates", codes.OK, func(ctx context.Context) (string, error) {
		id, err := w.createCall(ctx, b.name, b.parameters)
		if err != nil && w.clearHalfMade(b.name) {
			err = status.FromContextError(context.Canceled).Err() // repeat it
		}
		return id, err
	})
	if ok {
		b.id = id
		w.buckets[b.name] = b
	}
}

func (w *worker) createCall(ctx context.Context, name string, parameters map[string]string) (string, error) {
	answer, err := w.driver.DriverCreateBucket(ctx, &cosi.DriverCreateBucketRequest{Name: name, Parameters: parameters})
	return answer.GetBucketId(), err
}

// clearHalfMade removes a bucket's folder by hand, as docs/explanation/buckets.md says: a gateway that is killed
// between a bucket's folder and its attributes cannot serve it. It reports whether it removed one.
func (w *worker) clearHalfMade(name string) bool {
	folder := filepath.Join(w.dir, "buckets", name)
	lacking := func() bool {
		_, err := unix.Lgetxattr(folder, "user.X-Amz-Tagging", nil)
		return errors.Is(err, unix.ENODATA)
	}
	if !lacking() {
		return false
	}
	time.Sleep(time.Second) // the gateway may be making it now
	if !lacking() || os.Remove(folder) != nil {
		return false
	}
	w.count("folders removed by hand")
	return true
}

// changeAccesses grants some accesses and revokes others, all at once.
func (w *worker) changeAccesses(ctx context.Context, b *bucket) {
	var mu sync.Mutex
	var group sync.WaitGroup
	// at runs a call with random numbers of its own, and then what the worker notes of it.
	at := func(call func(*rand.Rand) bool, note func()) {
		random := rand.New(rand.NewPCG(w.random.Uint64(), 0))
		group.Go(func() {
			if call(random) {
				mu.Lock()
				defer mu.Unlock()
				note()
			}
		})
	}
	before := maps.Clone(b.accesses)
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if a := before[name]; w.random.IntN(3) == 0 {
			at(func(random *rand.Rand) bool { return w.revoke(ctx, random, b, a) }, func() {
				delete(b.accesses, name)
				w.revoked = append(w.revoked, a.client)
			})
		}
	}
	for range min(w.random.IntN(4), mostAccesses-len(before)) {
		w.made++
		a := &access{name: fmt.Sprintf("access-%d-%d", w.number, w.made), kind: buckets.ReadWrite}
		if w.random.IntN(2) == 0 {
			a.kind = buckets.ReadOnly
		}
		at(func(random *rand.Rand) bool { return w.grant(ctx, random, b, a) }, func() { b.accesses[a.name] = a })
	}
	group.Wait()
}

// grant grants an access, or repeats it, and tries the keys.
func (w *worker) grant(ctx context.Context, random *rand.Rand, b *bucket, a *access) bool {
	keys, ok := w.until(ctx, random, "grants", codes.OK, func(ctx context.Context) (string, error) {
		answer, err := w.driver.DriverGrantBucketAccess(ctx, &cosi.DriverGrantBucketAccessRequest{
			BucketId: b.id, Name: a.name, AuthenticationType: cosi.AuthenticationType_Key,
			Parameters: map[string]string{buckets.ParameterAccess: a.kind},
		})
		secrets := answer.GetCredentials()["s3"].GetSecrets()
		return answer.GetAccountId() + " " + secrets["accessKeyID"] + " " + secrets["accessSecretKey"], err
	})
	if !ok {
		return false
	}
	if a.keys != "" && keys != a.keys {
		w.violation("access %s of bucket %s: the repeated grant has other keys", a.name, b.name)
	}
	parts := strings.Split(keys, " ")
	a.keys, a.account, a.client = keys, parts[0], buckettest.Client(w.gateway.Endpoint, parts[1], parts[2])
	w.mu.Lock()
	w.secrets[parts[2]] = true
	w.mu.Unlock()
	w.try(ctx, b, a)
	return true
}

// revoke revokes an access, and tries the keys.
func (w *worker) revoke(ctx context.Context, random *rand.Rand, b *bucket, a *access) bool {
	_, ok := w.until(ctx, random, "revocations", codes.OK, func(ctx context.Context) (string, error) {
		_, err := w.driver.DriverRevokeBucketAccess(ctx, &cosi.DriverRevokeBucketAccessRequest{
			BucketId: b.id, AccountId: a.account,
		})
		return "", err
	})
	if ok {
		if err := list(ctx, a.client, b.name); !refused(err) {
			w.violation("bucket %s: revoked keys of %s: %v, want a refusal", b.name, a.name, err)
		}
	}
	return ok
}

// try checks what an access may do, and what it may not.
func (w *worker) try(ctx context.Context, b *bucket, a *access) {
	check := func(what string, err error, fine bool) {
		if !fine && ctx.Err() == nil {
			w.violation("%s access %s of bucket %s: %s: %v", a.kind, a.name, b.name, what, err)
		}
	}
	err := list(ctx, a.client, b.name)
	check("list its bucket", err, err == nil)
	err = put(ctx, a.client, b.name, "probe", "text")
	check("write to its bucket", err, (a.kind == buckets.ReadWrite) == (err == nil) && (err == nil || refused(err)))
	if a.kind == buckets.ReadOnly {
		err = remove(ctx, a.client, b.name, "probe")
		check("delete from its bucket", err, refused(err))
	}
	err = list(ctx, a.client, foreign)
	check("list another bucket", err, refused(err))
	_, err = get(ctx, a.client, foreign, secret)
	check("read from another bucket", err, refused(err))
	err = put(ctx, a.client, foreign, secret, "overwritten")
	check("write to another bucket", err, refused(err))
	err = remove(ctx, a.client, foreign, secret)
	check("delete from another bucket", err, refused(err))
	err = ask(ctx, func(ctx context.Context) error {
		_, err := a.client.CopyObject(ctx, &s3.CopyObjectInput{
			Bucket: &b.name, Key: aws.String("copy"), CopySource: aws.String(foreign + "/" + secret),
		})
		return err
	})
	check("copy from another bucket", err, refused(err))
	for name := range w.buckets {
		if name != b.name {
			err = list(ctx, a.client, name)
			check("list bucket "+name, err, refused(err))
		}
	}
}

// write writes an object with keys of the bucket, and reads another one.
func (w *worker) write(ctx context.Context, b *bucket) {
	for _, name := range slices.Sorted(maps.Keys(b.accesses)) {
		a := b.accesses[name]
		if a.kind == buckets.ReadWrite {
			w.made++
			key := fmt.Sprintf("folder/%d", w.random.IntN(5))
			text := strings.Repeat(fmt.Sprintf("text %d ", w.made), 1+w.random.IntN(1000))
			if err := put(ctx, a.client, b.name, key, text); err != nil {
				w.violation("bucket %s: write with keys of %s: %v", b.name, name, err)
			} else {
				w.count("objects written")
				b.objects[key] = text
			}
		}
		for key, want := range b.objects {
			if text, err := get(ctx, a.client, b.name, key); err != nil || text != want {
				w.violation("bucket %s: object %s read with keys of %s: %v, or another text", b.name, key, name, err)
			}
			return
		}
	}
}

// repeat repeats a create and a grant, and sends a create with other parameters.
func (w *worker) repeat(ctx context.Context, b *bucket) {
	id, ok := w.until(ctx, w.random, "repeated creates", codes.OK, func(ctx context.Context) (string, error) {
		return w.createCall(ctx, b.name, b.parameters)
	})
	if ok && id != b.id {
		w.violation("bucket %s: the repeated create answers %s, want %s", b.name, id, b.id)
	}
	other := maps.Clone(b.parameters)
	other[buckets.ParameterDeleteContents] = strconv.FormatBool(!b.deleteContents)
	differently := func(ctx context.Context) (string, error) {
		_, err := w.createCall(ctx, b.name, other)
		return "", err
	}
	w.until(ctx, w.random, "creates with other parameters", codes.AlreadyExists, differently)
	for _, a := range b.accesses {
		w.grant(ctx, w.random, b, a)
		break
	}
}

// delete deletes a bucket if it may be deleted, and otherwise sees that it is refused. Half of the buckets still have
// accesses, which are revoked afterwards: COSI's controller deletes in any order.
func (w *worker) delete(ctx context.Context, b *bucket) {
	if _, err := get(ctx, w.root, b.name, "probe"); !b.deleteContents && (len(b.objects) > 0 || err == nil) {
		w.deleteCall(ctx, "deletes of full buckets", b.id, codes.FailedPrecondition)
		if w.random.IntN(2) == 0 {
			return
		}
		w.clear(ctx, b)
	}
	if w.random.IntN(2) == 0 {
		w.revokeAll(ctx, b)
	}
	if w.deleteCall(ctx, "deletes", b.id, codes.OK) {
		w.revokeAll(ctx, b)
		delete(w.buckets, b.name)
	}
}

func (w *worker) revokeAll(ctx context.Context, b *bucket) {
	for name, a := range b.accesses {
		if w.revoke(ctx, w.random, b, a) {
			delete(b.accesses, name)
			w.revoked = append(w.revoked, a.client)
		}
	}
}

// clear deletes all objects of a bucket without versions.
func (w *worker) clear(ctx context.Context, b *bucket) {
	for _, key := range append(slices.Collect(maps.Keys(b.objects)), "probe") {
		if err := remove(ctx, w.root, b.name, key); err != nil {
			w.violation("bucket %s: delete object %s: %v", b.name, key, err)
		}
	}
	b.objects = map[string]string{}
}

func (w *worker) deleteCall(ctx context.Context, what, id string, want codes.Code) bool {
	_, ok := w.until(ctx, w.random, what, want, func(ctx context.Context) (string, error) {
		_, err := w.driver.DriverDeleteBucket(ctx, &cosi.DriverDeleteBucketRequest{BucketId: id})
		if err != nil && strings.Contains(err.Error(), buckets.LeftVersions) {
			w.clearVersions(ctx, strings.TrimPrefix(id, store+"/"))
		}
		return "", err
	})
	return ok
}

// clearVersions removes a bucket's folder of versions by hand, as docs/explanation/buckets.md says: a gateway that is
// killed while it deletes an object can leave what no list shows. It does nothing while the gateway lists a version.
func (w *worker) clearVersions(ctx context.Context, name string) {
	time.Sleep(time.Second) // the gateway may be deleting one now
	listed, err := w.root.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: &name})
	if err != nil || len(listed.Versions)+len(listed.DeleteMarkers) > 0 {
		return
	}
	if os.RemoveAll(filepath.Join(w.dir, "versions", name)) == nil {
		w.count("folders removed by hand")
	}
}

// deleteForeign asks for the deletion of a bucket that the driver did not make.
func (w *worker) deleteForeign(ctx context.Context) {
	w.deleteCall(ctx, "deletes of another's bucket", store+"/"+foreign, codes.FailedPrecondition)
}

// cleanUp revokes and deletes everything.
func (w *worker) cleanUp(ctx context.Context) {
	for name, b := range w.buckets {
		w.revokeAll(ctx, b)
		if !b.deleteContents {
			w.clear(ctx, b)
		}
		if w.deleteCall(ctx, "deletes", b.id, codes.OK) {
			delete(w.buckets, name)
		}
	}
}
