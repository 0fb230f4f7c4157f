// Package suite runs containerd's own snapshotter test suite against a running ramet-snapshotter.
//
// RAMET_SNAPSHOTTER is the program. Needs root: the suite mounts what it prepares.
package suite

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// serve starts a snapshotter of its own below dir.
func serve(ctx context.Context, dir string) (snapshots.Snapshotter, func() error, error) {
	socket := filepath.Join(dir, "s.sock")
	server := exec.Command(os.Getenv("RAMET_SNAPSHOTTER"), "--root", filepath.Join(dir, "root"), "--address", socket)
	server.Stderr = os.Stderr
	if err := server.Start(); err != nil {
		return nil, nil, err
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		connection, err := net.Dial("unix", socket)
		if err == nil {
			connection.Close()
			break
		}
		if time.Now().After(deadline) {
			server.Process.Kill()
			server.Wait()
			return nil, nil, err
		}
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	stop := func() error {
		connection.Close()
		server.Process.Signal(os.Interrupt)
		return server.Wait()
	}
	return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(connection), "ramet"), stop, nil
}

func TestSuite(t *testing.T) {
	if os.Getenv("RAMET_SNAPSHOTTER") == "" {
		t.Skip("RAMET_SNAPSHOTTER names no program")
	}
	// By this name the suite leaves out what no overlay can do: renaming a directory of a lower layer.
	testsuite.SnapshotterSuite(t, "overlayfs", serve)
}
