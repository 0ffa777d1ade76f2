"""OpenAI's audio routes: speech to text in files and over web sockets."""
